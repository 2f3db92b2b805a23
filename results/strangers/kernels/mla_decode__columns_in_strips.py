"""RIGHT.  Scores are summed over strips of 40 columns, from the last (rotary) columns to the first, into scratch
memory.  Then the weights are made, and the output is computed in strips of 56 of the latent columns.  Sequences are
done from the shortest to the longest."""

import torch

from rooflab.kernels.registry import register


@register(op="mla_decode", name="columns_in_strips", role="optimized", backend="torch")
def mla_decode(q, kv_cache, block_table, seq_lens, latent_dim, softmax_scale, *, return_lse=False):
    (B, H, D), size = q.shape, kv_cache.shape[1]
    out = torch.zeros((B, H, latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.full((B, H), float("-inf"), dtype=torch.float32, device=q.device)
    lengths = seq_lens.tolist()
    for b in sorted(range(B), key=lengths.__getitem__):
        if not lengths[b]:
            continue
        at = torch.arange(lengths[b], device=q.device)
        kv = kv_cache[block_table[b, : -(-lengths[b] // size)].long()[at // size], at % size].double()
        scores = torch.zeros((lengths[b], H), dtype=torch.float64, device=q.device)
        for start in reversed(range(0, D, 40)):
            scores += kv[:, start : start + 40] @ q[b, :, start : start + 40].double().mT
        scores *= softmax_scale
        peak = scores.amax(0)
        weights = torch.exp(scores - peak)
        total = weights.sum(0)
        for start in range(0, latent_dim, 56):
            values = kv[:, start : min(start + 56, latent_dim)]
            out[b, :, start : start + 56] = ((weights / total).mT @ values).to(q.dtype)
        lse[b] = (peak + total.log()).float()
    return (out, lse) if return_lse else out

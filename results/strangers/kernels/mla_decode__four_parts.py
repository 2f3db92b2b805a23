"""WRONG.  A sequence's keys are cut into four parts of length // 4 keys.  For lengths that 4 divides that is all of
them.  For other lengths up to three of the newest keys, those that matter most, belong to no part."""

import torch

from rooflab.kernels.registry import register

PARTS = 4


@register(op="mla_decode", name="four_parts", role="optimized", backend="torch")
def mla_decode(q, kv_cache, block_table, seq_lens, latent_dim, softmax_scale, *, return_lse=False):
    (B, H, _), size = q.shape, kv_cache.shape[1]
    out = torch.zeros((B, H, latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.full((B, H), float("-inf"), dtype=torch.float32, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        each = length // PARTS if length >= PARTS else length
        found = []
        for start in range(0, each * PARTS if length >= PARTS else length, max(each, 1)):
            at = torch.arange(start, start + each, device=q.device)
            kv = kv_cache[block_table[b].long()[at // size], at % size].float()
            scores = q[b].float() @ kv.mT * softmax_scale
            own = torch.logsumexp(scores, -1)
            found.append((own, torch.exp(scores - own[:, None]) @ kv[:, :latent_dim]))
        if found:
            sums = torch.stack([own for own, _ in found])
            lse[b] = torch.logsumexp(sums, 0)
            weights = torch.exp(sums - lse[b])
            out[b] = sum(w[:, None] * value for w, (_, value) in zip(weights, found, strict=True)).to(q.dtype)
    return (out, lse) if return_lse else out

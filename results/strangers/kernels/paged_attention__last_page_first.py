"""RIGHT.  Each sequence is read in strips of whole pages, of 64 slots or more, the newest strip first, with a running
maximum and sum for all its queries and heads at once.  Pages that no query's window reaches are not looked at, and
only used slots are read.  The sink is merged last, as if it were one more page without a value."""

import torch

from rooflab.kernels.registry import register


@register(op="paged_attention", name="last_page_first", role="optimized", backend="torch")
def paged_attention(
    q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None,
    *, cu_seqlens_q=None, window=None, softcap=None, sinks=None, k_scale=None, v_scale=None, return_lse=False,
):  # fmt: skip
    (T, H, D), (_, size, H_kv, _) = q.shape, k_cache.shape
    scale, group = D**-0.5 if softmax_scale is None else softmax_scale, H // H_kv
    out = torch.zeros((T, H, D), dtype=q.dtype, device=q.device)
    lse = torch.full((T, H), float("-inf"), dtype=torch.float32, device=q.device)
    bounds = list(range(T + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        start, end = bounds[b], bounds[b + 1]
        if end == start:
            continue
        rows = q[start:end].double().view(end - start, H_kv, group, D)
        peak = rows.new_full((end - start, H_kv, group), float("-inf"))
        total, result = torch.zeros_like(peak), torch.zeros_like(rows)
        last = torch.arange(length - (end - start), length, device=q.device)  # the newest key of each query
        first = 0 if window is None else max(0, length - (end - start) - window + 1)
        strip = -(-64 // size) * size
        for part in reversed(range(first // strip, -(-length // strip))):
            keys = torch.arange(max(part * strip, first), min((part + 1) * strip, length), device=q.device)
            cell, offset = block_table[b].long()[keys // size], keys % size
            k, v = k_cache[cell, offset].double(), v_cache[cell, offset].double()
            if k_scale is not None:
                k, v = k * k_scale.double()[:, None], v * v_scale.double()[:, None]
            scores = torch.einsum("thgd,shd->thgs", rows, k) * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            seen = keys <= last[:, None]
            seen = seen if window is None else seen & (keys > last[:, None] - window)
            scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
            higher = torch.maximum(peak, scores.amax(-1))
            shift = higher.nan_to_num(neginf=0.0)
            keep, weights = torch.exp(peak - shift), torch.exp(scores - shift[..., None])
            v = v.masked_fill(~seen.any(0)[:, None, None], 0.0)
            result = result * keep[..., None] + torch.einsum("thgs,shd->thgd", weights, v)
            total, peak = total * keep + weights.sum(-1), higher
        if sinks is not None:
            sink = sinks.double().view(H_kv, group)
            higher = torch.maximum(peak, sink)
            keep = torch.exp(peak - higher)
            result, total, peak = result * keep[..., None], total * keep + torch.exp(sink - higher), higher
        out[start:end] = (result / torch.where(total == 0, 1.0, total)[..., None]).flatten(1, 2).to(q.dtype)
        lse[start:end] = (peak + total.log()).flatten(1).float()
    return (out, lse) if return_lse else out

"""RIGHT.  Sequences are done from the longest to the shortest.  Each one is a loop over chunks of 37 keys, from the
first to the last, with a running maximum and sum in fp64 for all heads.  A sink joins at the end."""

import torch

from rooflab.kernels.registry import register


@register(op="flash_attention_varlen", name="longest_first", role="optimized", backend="torch")
def flash_attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, softmax_scale=None,
    *, window=None, softcap=None, sinks=None, return_lse=False,
):  # fmt: skip
    (T, H, D), H_kv = q.shape, k.shape[1]
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros((T, H, D), dtype=q.dtype, device=q.device)
    lse = torch.full((T, H), float("-inf"), dtype=torch.float32, device=q.device)
    spans = [cu.tolist() for cu in (cu_seqlens_q, cu_seqlens_k)]
    order = sorted(range(len(spans[0]) - 1), key=lambda b: spans[1][b] - spans[1][b + 1])
    for b in order:
        (t, t_end), (s, s_end) = spans[0][b : b + 2], spans[1][b : b + 2]
        rows = q[t:t_end].double().unflatten(1, (H_kv, H // H_kv))
        newest = torch.arange(s_end - (t_end - t), s_end, device=q.device)[:, None]
        peak = rows.new_full(rows.shape[:-1], float("-inf"))
        total, result = torch.zeros_like(peak), torch.zeros_like(rows)
        for start in range(s, s_end, 37):
            keys = torch.arange(start, min(start + 37, s_end), device=q.device)
            scores = torch.einsum("tkgd,skd->tkgs", rows, k[keys].double()) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if causal:
                hidden = keys > newest
                if window is not None:
                    hidden = hidden | (keys <= newest - window)
                scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
            higher = torch.maximum(peak, scores.amax(-1))
            shift = higher.nan_to_num(neginf=0.0)
            keep, weights = torch.exp(peak - shift), torch.exp(scores - shift[..., None])
            result = result * keep[..., None] + torch.einsum("tkgs,skd->tkgd", weights, v[keys].double())
            total, peak = total * keep + weights.sum(-1), higher
        if sinks is not None:
            sink = sinks.double().unflatten(0, (H_kv, H // H_kv))
            higher = torch.maximum(peak, sink)
            keep = torch.exp(peak - higher)
            result, total, peak = result * keep[..., None], total * keep + torch.exp(sink - higher), higher
        out[t:t_end] = (result / torch.where(total == 0, 1.0, total)[..., None]).flatten(1, 2).to(q.dtype)
        lse[t:t_end] = (peak + total.log()).flatten(1).float()
    return (out, lse) if return_lse else out

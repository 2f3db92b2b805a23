"""WRONG.  With a window the kernel reads a sequence's keys from `length - window` on: that is where the window of
its last query begins.  For one query a sequence it is right.  With several queries (chunked prefill, drafted
tokens) the earlier ones have windows that begin earlier, and they miss these keys."""

import torch

from rooflab.kernels.registry import register


@register(op="paged_attention", name="window_of_the_last", role="optimized", backend="torch")
def paged_attention(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    softmax_scale=None,
    *,
    cu_seqlens_q=None,
    window=None,
    softcap=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
    return_lse=False,
):
    (T, H, D), (_, block_size, H_kv, _) = q.shape, k_cache.shape
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    out, lse = torch.zeros(T, H, D, dtype=q.dtype), torch.full((T, H), float("-inf"))
    bounds = list(range(T + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        start, end = bounds[b], bounds[b + 1]
        begin = 0 if window is None else max(0, length - window)
        at = torch.arange(begin, length)
        page = block_table[b].long()[at // block_size]
        keys, values = k_cache[page, at % block_size].double(), v_cache[page, at % block_size].double()
        if k_scale is not None:
            keys, values = keys * k_scale[:, None].double(), values * v_scale[:, None].double()
        last = torch.arange(start, end)[:, None] - end + length
        hidden = at > last
        if window is not None:
            hidden = hidden | (at <= last - window)
        for h in range(H if end > start else 0):
            scores = q[start:end, h].double() @ keys[:, h // (H // H_kv)].mT * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(hidden, float("-inf"))
            sink = scores.new_full((end - start, 1), float("-inf") if sinks is None else float(sinks[h]))
            total = torch.logsumexp(torch.cat((scores, sink), -1), -1, keepdim=True)
            weights = torch.exp(scores - total.nan_to_num(neginf=0.0))
            out[start:end, h] = (weights @ values[:, h // (H // H_kv)]).to(q.dtype)
            lse[start:end, h] = total[:, 0].float()
    return (out, lse) if return_lse else out

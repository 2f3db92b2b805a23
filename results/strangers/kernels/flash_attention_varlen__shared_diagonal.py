"""WRONG.  The causal diagonal of each sequence is shifted by max_seqlen_k - max_seqlen_q instead of by its own
lengths.  If all sequences have equally many keys more than queries, that is the same.  In a batch of prefills with
cached prefixes of different lengths, or with maxima rounded up to a bucket, queries see too many or too few keys.
"""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def attend_row(
    q, k, v, firsts, ends, out, lse, scale, q_t, q_h, k_s, k_h, v_s, v_h, H, D, group, N: tl.constexpr, BD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    at = tl.arange(0, BD)
    query = tl.load(q + row * q_t + h * q_h + at, at < D, 0.0).to(tl.float32) * scale
    first = tl.load(firsts + row)
    end = tl.load(ends + row)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    result = tl.zeros((BD,), tl.float32)
    for start in range(first, end, N):
        key = (start + tl.arange(0, N)).to(tl.int64)
        live = key < end
        mask = live[:, None] & (at < D)[None, :]
        kv = h // group
        keys = tl.load(k + key[:, None] * k_s + kv * k_h + at[None, :], mask, 0.0).to(tl.float32)
        scores = tl.where(live, tl.sum(keys * query[None, :], 1), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp(scores - higher)
        keep = tl.exp(peak - higher)
        values = tl.load(v + key[:, None] * v_s + kv * v_h + at[None, :], mask, 0.0).to(tl.float32)
        result = result * keep + tl.sum(weights[:, None] * values, 0)
        total = total * keep + tl.sum(weights, 0)
        peak = higher
    tl.store(out + (row * H + h) * D + at, result / tl.where(total == 0, 1.0, total), at < D)
    tl.store(lse + row * H + h, peak + tl.log(total))


@register(op="flash_attention_varlen", name="shared_diagonal", role="optimized", backend="triton")
def flash_attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal=False,
    softmax_scale=None,
    *,
    return_lse=False,
):
    (T, H, D), H_kv = q.shape, k.shape[1]
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((T, H), dtype=torch.float32, device=q.device)
    counts = cu_seqlens_q.diff().long()
    first = cu_seqlens_k[:-1].repeat_interleave(counts)
    keys = cu_seqlens_k.diff().repeat_interleave(counts)
    if causal:
        place = torch.arange(T, device=q.device) - cu_seqlens_q[:-1].repeat_interleave(counts)
        keys = torch.minimum(keys, place + 1 + max_seqlen_k - max_seqlen_q).clamp(min=0)
    if q.numel():
        attend_row[(T, H)](
            q, k, v, first, (first + keys).int(), out, lse, D**-0.5 if softmax_scale is None else softmax_scale,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], H, D, H // H_kv, N=32, BD=triton.next_power_of_2(D),
        )  # fmt: skip
    return (out, lse) if return_lse else out

"""WRONG.  The keys of a sequence are split into parts of 64 for several programs, and each program adds the sink to
its own denominator.  With one part that is right, and without sinks it always is.  A sequence of more than 64 keys
with sinks (gpt-oss) counts its sink once for each part."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def attend_part(
    q, k, v, table, lengths, sinks, parts_out, peaks, totals, scale, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, t_b,
    H, D, group, page_size, parts, SINKS: tl.constexpr, PART: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + b)
    at = tl.arange(0, BD)
    query = tl.load(q + b * q_t + h * q_h + at, at < D, 0.0).to(tl.float32) * scale
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if SINKS:
        live_part = (part == 0) | (part * PART < length)
        peak = tl.where(live_part, tl.load(sinks + h), peak)
        total = tl.where(live_part, 1.0, 0.0)
    result = tl.zeros((BD,), tl.float32)
    first = part * PART
    for start in range(first, tl.minimum(first + PART, length), N):
        key = start + tl.arange(0, N)
        live = key < length
        page = tl.load(table + b * t_b + key // page_size, live, 0).to(tl.int64)
        offset = key % page_size
        mask = live[:, None] & (at < D)[None, :]
        kv = h // group
        keys = tl.load(k + (page * k_b + offset * k_s + kv * k_h)[:, None] + at[None, :], mask, 0.0).to(tl.float32)
        scores = tl.where(live, tl.sum(keys * query[None, :], 1), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0))
        keep = tl.exp(peak - higher)
        weights = tl.exp(scores - higher)
        values = tl.load(v + (page * v_b + offset * v_s + kv * v_h)[:, None] + at[None, :], mask, 0.0).to(tl.float32)
        result = result * keep + tl.sum(weights[:, None] * values, 0)
        total = total * keep + tl.sum(weights, 0)
        peak = higher
    place = (b * H + h) * parts + part
    tl.store(parts_out + place * D + at, result, at < D)
    tl.store(peaks + place, peak)
    tl.store(totals + place, total)


@register(op="paged_attention", name="sink_in_each_split", role="optimized", backend="triton")
def paged_attention(q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None, *, sinks=None, return_lse=False):
    (T, H, D), (_, page_size, H_kv, _) = q.shape, k_cache.shape
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    parts = max(1, triton.cdiv(block_table.shape[1] * page_size, 64))
    values = torch.empty((T, H, parts, D), dtype=torch.float32, device=q.device)
    peaks, totals = values.new_empty((T, H, parts)), values.new_empty((T, H, parts))
    if q.numel():
        attend_part[(T, H, parts)](
            q, k_cache, v_cache, block_table, seq_lens, seq_lens if sinks is None else sinks, values, peaks, totals,
            scale, q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0), H, D,
            H // H_kv, page_size, parts, SINKS=sinks is not None, PART=64, N=16, BD=triton.next_power_of_2(D),
        )  # fmt: skip
    peak = peaks.amax(-1)
    weights = torch.exp(peaks - peak.nan_to_num(neginf=0.0)[..., None])
    total = (weights * totals).sum(-1)
    out = (weights[..., None] * values).sum(-2) / torch.where(total == 0, 1.0, total)[..., None]
    return (out.to(q.dtype), peak + torch.log(total)) if return_lse else out.to(q.dtype)

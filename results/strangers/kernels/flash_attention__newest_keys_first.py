"""RIGHT.  Tiles of 16 queries of one head go over tiles of 32 keys from the newest to the oldest.  The running
maximum begins at the sink, if there is one.  Rows that have seen no key yet are shifted by 0.  A program is one
tile of a flat list of tiles, heads and sequences; the last tile of all is done by the first program."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def attend(
    q, k, v, sinks, out, lse, T, S, H, D, group, tiles, scale, cap, window,
    q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, s_h, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    flat = tl.num_programs(0) - 1 - tl.program_id(0)
    h = flat // tiles % H
    b = (flat // tiles // H).to(tl.int64)
    row = flat % tiles * M + tl.arange(0, M)
    at = tl.arange(0, BD)
    inside = (row < T)[:, None] & (at < D)[None, :]
    newest = row + S - T
    query = tl.load(q + b * q_b + row.to(tl.int64)[:, None] * q_t + h * q_h + at[None, :], inside, 0.0)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if SINKS:
        peak = tl.zeros((M,), tl.float32) + tl.load(sinks + h * s_h)
        total += 1.0
    result = tl.zeros((M, BD), tl.float32)
    steps = tl.cdiv(S, N)
    for step in range(0, steps):
        key = (steps - 1 - step) * N + tl.arange(0, N)
        seen = (key < S)[None, :] & (row < T)[:, None]
        if CAUSAL:
            seen = seen & (key[None, :] <= newest[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > newest[:, None] - window)
        if tl.max(seen.to(tl.int32)) > 0:
            mask = (key < S)[:, None] & (at < D)[None, :]
            place = key.to(tl.int64)[:, None]
            keys = tl.load(k + b * k_b + place * k_s + (h // group) * k_h + at[None, :], mask, 0.0)
            values = tl.load(v + b * v_b + place * v_s + (h // group) * v_h + at[None, :], mask, 0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            if CAP:
                small = tl.exp(-2.0 * tl.abs(scores / cap))
                scores = cap * tl.where(scores < 0, -1.0, 1.0) * ((1.0 - small) / (1.0 + small))
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            keep = tl.exp(peak - shift)
            weights = tl.exp(scores - shift[:, None])
            result = result * keep[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            total = total * keep + tl.sum(weights, 1)
            peak = higher
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    place = (b * T + row) * H + h
    tl.store(out + place[:, None] * D + at[None, :], result, inside)
    tl.store(lse + place, tl.where(total == 0, float("-inf"), peak + tl.log(total)), row < T)


@register(
    op="flash_attention",
    name="newest_keys_first",
    role="optimized",
    backend="triton",
    unsupported=lambda inputs: "no e4m3" if inputs.q.element_size() == 1 else None,
)
def flash_attention(
    q, k, v, causal=False, softmax_scale=None, *, window=None, softcap=None, sinks=None, return_lse=False
):
    (B, T, H, D), (_, S, H_kv, _) = q.shape, k.shape
    out = torch.empty((B, T, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
    if q.numel():
        tiles = triton.cdiv(T, 16)
        attend[(tiles * H * B,)](
            q, k, v, q if sinks is None else sinks, out, lse, T, S, H, D, H // H_kv, tiles, D**-0.5 if softmax_scale is
            None else softmax_scale, softcap or 1.0, window or 0, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], 0
            if sinks is None else sinks.stride(0), CAUSAL=causal, WINDOW=window is not None, CAP=softcap is not None,
            SINKS=sinks is not None, M=16, N=32, BD=max(16, triton.next_power_of_2(D)),
        )  # fmt: skip
    return (out, lse) if return_lse else out

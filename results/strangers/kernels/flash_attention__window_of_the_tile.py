"""WRONG.  A tile of 32 queries skips the tiles of keys in front of its window, but of the window of the tile's last
query.  The first queries of the tile may see up to 31 keys more.  Without a window, or with one wider than the
sequence, the kernel is right; with a window most rows miss their oldest keys."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def attend(
    q, k, v, out, lse, T, S, H, D, group, scale, window, q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * M
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = start + tl.arange(0, M)
    at = tl.arange(0, BD)
    newest = row + S - T
    query = tl.load(
        q + b * q_b + row[:, None] * q_t + h * q_h + at[None, :], (row < T)[:, None] & (at < D)[None, :], 0.0
    )
    low, high = 0, S
    if CAUSAL:
        high = tl.minimum(S, tl.maximum(start + M + S - T, 0))
    if WINDOW:
        low = tl.maximum(0, start + M - 1 + S - T - window + 1) // N * N
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    result = tl.zeros((M, BD), tl.float32)
    for first in range(low, high, N):
        key = first + tl.arange(0, N)
        mask = (key < S)[:, None] & (at < D)[None, :]
        keys = tl.load(k + b * k_b + key[:, None] * k_s + (h // group) * k_h + at[None, :], mask, 0.0)
        values = tl.load(v + b * v_b + key[:, None] * v_s + (h // group) * v_h + at[None, :], mask, 0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        seen = (key < S)[None, :] & (row < T)[:, None]
        if CAUSAL:
            seen = seen & (key[None, :] <= newest[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > newest[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp(peak - shift)
        weights = tl.exp(scores - shift[:, None])
        result = result * keep[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * keep + tl.sum(weights, 1)
        peak = higher
    place = (b * T + row) * H + h
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + place[:, None] * D + at[None, :], result, (row < T)[:, None] & (at < D)[None, :])
    tl.store(lse + place, peak + tl.log(total), row < T)


@register(
    op="flash_attention",
    name="window_of_the_tile",
    role="optimized",
    backend="triton",
    unsupported=lambda inputs: "no e4m3" if inputs.q.element_size() == 1 else None,
)
def flash_attention(q, k, v, causal=False, softmax_scale=None, *, window=None, return_lse=False):
    (B, T, H, D), (_, S, H_kv, _) = q.shape, k.shape
    out = torch.empty((B, T, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
    if q.numel():
        attend[(triton.cdiv(T, 32), H, B)](
            q, k, v, out, lse, T, S, H, D, H // H_kv, D**-0.5 if softmax_scale is None else softmax_scale, window or 0,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], CAUSAL=causal, WINDOW=window is not None, M=32, N=16,
            BD=max(16, triton.next_power_of_2(D)),
        )  # fmt: skip
    return (out, lse) if return_lse else out

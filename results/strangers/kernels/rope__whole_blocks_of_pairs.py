"""WRONG.  The pairs of a head are rotated in blocks of 32, and only whole blocks are done: half // 32 of
them.  Heads of 64, 128 and 256 are right.  With D = 80 or 96 (Phi, StableLM) the last pairs keep their old values.
"""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def turn(
    x, out, cos, sin, positions, t_stride, h_stride, c_stride, s_stride, H, D, NEAR: tl.constexpr, B: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = D // 2
    position = tl.load(positions + token)
    for start in range(0, half // B * B, B):
        pair = start + tl.arange(0, B)
        one = 2 * pair if NEAR else pair
        two = 2 * pair + 1 if NEAR else pair + half
        c = tl.load(cos + position * c_stride + pair)
        s = tl.load(sin + position * s_stride + pair)
        first = tl.load(x + token * t_stride + head * h_stride + one).to(tl.float32)
        second = tl.load(x + token * t_stride + head * h_stride + two).to(tl.float32)
        row = out + (token * H + head) * D
        tl.store(row + one, first * c - second * s)
        tl.store(row + two, second * c + first * s)


@register(op="rope", name="whole_blocks_of_pairs", role="optimized", backend="triton")
def rope(q, k, cos, sin, positions, interleaved=False):
    results = []
    block = min(32, 1 << max(q.shape[-1] // 2, 1).bit_length() - 1)
    for x in (q, k):
        (T, H, D), out = x.shape, x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            turn[(T, H)](
                x,
                out,
                cos,
                sin,
                positions.contiguous(),
                x.stride(0),
                x.stride(1),
                cos.stride(0),
                sin.stride(0),
                H,
                D,
                NEAR=interleaved,
                B=block,
            )
        results.append(out)
    return tuple(results)

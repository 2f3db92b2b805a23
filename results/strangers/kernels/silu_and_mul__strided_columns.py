"""RIGHT.  A program does not own neighbouring columns: of P programs of a row, program p takes the columns p, p +
P, p + 2 P and so on, the last ones first.  The exponential always has an argument of at most 0."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def gated(x, out, stride, I, programs, rounds, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0)
    for step in range(0, rounds):
        at = first + ((rounds - 1 - step) * BLOCK + tl.arange(0, BLOCK)) * programs
        gate = tl.load(x + row * stride + at, at < I, 0.0).to(tl.float32)
        up = tl.load(x + row * stride + I + at, at < I, 0.0).to(tl.float32)
        small = tl.exp(-tl.abs(gate))
        weight = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
        tl.store(out + row * I + at, gate * weight * up, at < I)


@register(op="silu_and_mul", name="strided_columns", role="optimized", backend="triton")
def silu_and_mul(x):
    T, I = x.shape[0], x.shape[1] // 2
    out = torch.empty((T, I), dtype=x.dtype, device=x.device)
    programs = 3
    rounds = triton.cdiv(triton.cdiv(I, programs), 64)
    for start in range(0, T, 60000):  # the second dimension of a grid has at most 65535 programs
        rows = min(60000, T - start)
        if I:
            gated[(programs, rows)](x[start:], out[start:], x.stride(0), I, programs, rounds, BLOCK=64)
    return out

"""Implements the kernel `dequant_dot` in Triton: converts a tile's codes to bf16 in registers, which is exact.

Along K, a tile has one group.  The scales multiply the fp32 sums of a group, so no weight is rounded.  A minimum is
multiplied by the sum of its group's activations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import along_k
from rooflab.kernels.gemm._tiles import StreamTile, by_pointers, space
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

_configs = space(StreamTile, ((16, 32, 64), (64, 128), (32,)), num_warps=(4, 8), num_stages=(2, 3, 4))


def _heuristic(case: Case, scheme: Scheme = BF16) -> StreamTile:
    """Chooses 16 to 64 rows of `a`, and 64 rows of the weight.  Not measured on a GPU."""
    M = int(case["M"])
    return StreamTile(next((rows for rows in (16, 32) if M <= rows), 64), 64, 32, num_warps=4, num_stages=3)


@triton.jit
def _dot(
    a_ptr, b_ptr, scale_ptr, minimum_ptr, bias_ptr, out_ptr, M, N, K, stride_am, stride_bn, stride_sn, stride_mn,
    stride_om,
    BITS: tl.constexpr, HAS_MINIMUM: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    # int64, because row * stride passes 2**31 from N * K = 2**31 codes on.  Rows behind the last one read the last one.
    rows = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) // tiles_m).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = tl.minimum(rows, M - 1), tl.minimum(columns, N - 1)
    BYTES: tl.constexpr = GROUP * BITS // 8
    a_ptrs = a_ptr + row[:, None] * stride_am + tl.arange(0, GROUP)[None, :]
    # Triton up to 3.8.0 multiplies a joined operand of 16 values along K wrongly by mma.sync: half of the values count
    # twice (kWidth 8; the emulator showed it; mended by triton-lang/triton#11691).  So each code of such a group loads
    # its own byte.
    BY_CODE: tl.constexpr = BITS == 4 and GROUP == 16
    code_offsets = tl.arange(0, GROUP)
    byte_offsets = code_offsets // 2 if BY_CODE else tl.arange(0, BYTES)
    b_ptrs = b_ptr + column[:, None] * stride_bn + byte_offsets[None, :]
    tile_sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(K // GROUP):
        a, codes = tl.load(a_ptrs), tl.load(b_ptrs)
        if BITS == 4:
            zero: tl.constexpr = 0 if HAS_MINIMUM else 8
            if BY_CODE:
                codes = ((codes >> (code_offsets % 2 * 4).to(tl.uint8)[None, :]) & 15).to(tl.int16) - zero
            else:
                low_code, high_code = (codes & 15).to(tl.int16) - zero, (codes >> 4).to(tl.int16) - zero
                codes = tl.join(low_code, high_code).reshape(BLOCK_N, GROUP)
        group_sums = tl.dot(a, codes.to(tl.bfloat16).T)
        tile_sums += group_sums * tl.load(scale_ptr + column * stride_sn + group).to(tl.float32)[None, :]
        if HAS_MINIMUM:
            minimum = tl.load(minimum_ptr + column * stride_mn + group).to(tl.float32)
            tile_sums -= tl.sum(a.to(tl.float32), axis=1)[:, None] * minimum[None, :]
        a_ptrs += GROUP
        b_ptrs += BYTES
    if HAS_BIAS:
        tile_sums += tl.load(bias_ptr + column).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, tile_sums.to(tl.bfloat16), mask=(rows < M)[:, None] & (columns < N)[None, :])


def arranged(of: Arguments) -> Any:
    """Computes the grid, sizes, strides and constants of a launch."""
    (M, K), N, config = of.a.shape, of.b.shape[0], of.config
    minimum_stride = 0 if of.minimum is None else of.minimum.stride(0)
    strides = of.a.stride(0), of.b.stride(0), of.scale.stride(0), minimum_stride, of.c.stride(0)
    constants = {
        "BITS": 4 if of.b.dtype == torch.uint8 else 8,
        "HAS_MINIMUM": of.minimum is not None,
        "HAS_BIAS": of.bias is not None,
        "GROUP": K // of.scale.shape[1],
        **config.launch_arguments,
    }
    return (cdiv(M, config.block_m) * cdiv(N, config.block_n),), (M, N, K, *strides), constants


def traffic(inputs: Arguments) -> Traffic:
    """Counts `a` once.  The weight counts once per tile of rows of `a`, as if L2 did not keep it."""
    a, N = inputs.a, inputs.b.shape[0]
    weight_bytes = nbytes(inputs.b, inputs.scale, inputs.minimum)
    tiles = max(cdiv(len(a), inputs.config.block_m), 1)
    return Traffic(nbytes(a, inputs.bias) + tiles * weight_bytes, len(a) * N * a.element_size())


@kernel(
    backend="triton",
    holds={
        "b[1] == 1": "stride 1 along the codes",
        "scale[1] == 1 or G <= 1": "stride 1 along groups",
        "minimum is None or minimum[1] == 1 or G <= 1": "stride 1 along groups",
        **along_k("a"),
    },
    bind=arranged,
    traffic=traffic,
    tuning=Tuning(StreamTile, _configs, _heuristic, by_pointers),
    fenced_since="3.7.1",
    over="naive",
    shows={"M=64,N=28672,K=4096,group=32,minimum=true,bias=false in gguf_{q4|q8}": "loop.mma + loop.wgmma > 0"},
)
def dequant_dot(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    bias: Tensor | None,
    c: Tensor,
    *,
    config: StreamTile,
    bound: Any,
) -> None:
    """Computes `a @ W^T + bias`, with `W = scale * code - minimum`, on tensor cores."""
    grid, scalar_args, constants = bound
    _dot[grid](a, b, scale, minimum, bias, c, *scalar_args, **constants)

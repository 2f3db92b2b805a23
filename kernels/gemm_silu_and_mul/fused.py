"""Implements the kernel `fused` in one launch.  The products with gate and up stay in fp32 registers.

The kernel improves on `library`.  It saves two launches, and a write and a read of `2 * I` columns.  A tile of B has
columns of gate and the same columns of up.  So a thread holds the gate value and the up value of each position.  The
next tiles are loaded by cp.async during a product.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import grouped_tile
from rooflab.kernels.gemm_silu_and_mul._configs import FUSED, Config
from rooflab.kernels.gemm_silu_and_mul._maps import traffic
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments


@triton.jit
def _silu_product(tile):
    """Returns `silu(gate) * up` in fp32.  The tile holds `gate` in its left half and `up` in its right half. A thread
    holds both values of a position."""
    rows: tl.constexpr = tile.shape[0]
    half_columns: tl.constexpr = tile.shape[1] // 2
    gate, up = tl.split(tl.permute(tl.reshape(tile, (rows, 2, half_columns)), (0, 2, 1)))
    exp_minus_abs = tl.exp(-tl.abs(gate))  # exp(-|gate|) cannot overflow
    return tl.where(gate >= 0.0, gate, gate * exp_minus_abs) / (1.0 + exp_minus_abs) * up


@triton.jit
def _gemm(
    a_ptr, b_ptr, out_ptr, M, I, K, stride_am, stride_ak, stride_bk, stride_bn, stride_om,
    BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_i = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(I, BLOCK_I), GROUP_M)
    # int64, because row * stride passes 2**31 from M * K = 2**31 on.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_columns = tl.arange(0, 2 * BLOCK_I)
    columns = tile_i.to(tl.int64) * BLOCK_I + tile_columns % BLOCK_I
    b_columns = columns + tile_columns // BLOCK_I * tl.cast(I, tl.int64)  # columns of gate, then the same columns of up
    k_offsets = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + k_offsets.to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + k_offsets.to(tl.int64)[:, None] * stride_bk + b_columns[None, :] * stride_bn
    accumulator = tl.zeros((BLOCK_M, 2 * BLOCK_I), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows < M)[:, None] & (k_offsets < K - k)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(k_offsets < K - k)[:, None] & (columns < I)[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
    out = _silu_product(accumulator).to(out_ptr.dtype.element_ty)
    out_columns = tile_i.to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    out_mask = (rows < M)[:, None] & (out_columns < I)[None, :]
    tl.store(out_ptr + rows[:, None] * stride_om + out_columns[None, :], out, mask=out_mask)


def by_pointers(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options: the grid, sizes and strides."""
    (M, K), I, config = of.a.shape, of.out.shape[1], of.config
    grid = (cdiv(M, config.block_m) * cdiv(I, config.block_i),)
    return grid, (M, I, K, *of.a.stride(), *of.b.stride(), of.out.stride(0))


@kernel(
    backend="triton",
    traffic=traffic,
    tuning=FUSED,
    bind=by_pointers,
    fenced_since="3.7.1",
    over="naive",
    shows={
        "": 'calls("library").total == 3',
        "M=2048,I=14336,K=4096,layout=NT": (
            "loop.wgmma == 4 and loop.cp_async > loop.global_load == loop.special_function == 0; "
            'in_ptx("m64n256k16") and STG_E_128 == global_store == 128 * 128 * 2 // (16 * threads) '
            "and stack_bytes == 0"
        ),
        "M=2048,I=14336,K=4096,layout=NT in fp32": "not uses_tf32",
    },
)
def fused(a: Tensor, b: Tensor, out: Tensor, *, config: Config, bound: Any) -> None:
    """Computes `silu(a @ gate) * (a @ up)` on tensor cores, or by FMAs in fp32.  Sums in fp32, rounded once."""
    grid, scalar_args = bound
    _gemm[grid](a, b, out, *scalar_args, **config.launch_arguments)

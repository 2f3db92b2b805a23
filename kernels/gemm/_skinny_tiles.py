"""What `split_k` and `stream_k` share: tiles for few rows of a, what a tile needs, and its store."""

from __future__ import annotations

import triton
import triton.language as tl

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.gemm._tiled import ADDRESS_REGISTERS, add_bias_and_residual, by_fma, uses_wgmma
from rooflab.kernels.tuning import SHARED_BYTES_PER_CTA
from rooflab.reference.spec import Scheme

REDUCE_COLUMNS = 256
"""Outputs per CTA of the second launch."""
BYTES_IN_FLIGHT = 64 * 1024
"""Per CTA: three times what HBM's latency needs per SM (3.35 TB/s times 0.7 us are 18 KB for each of 132 SMs)."""


def tile(M: int, scheme: Scheme) -> tuple[int, int, int]:
    """block_m, block_n, block_k: the least rows of a product, and 256 bytes of each row of the weight (128 bytes if the
    tile of a is as large as the weight's)."""
    if by_fma(scheme):
        return (16 if M <= 16 else 32), 32, 32
    block_m = min(max(next_power_of_2(M), 16), 64)
    return block_m, 64, (256 if block_m < 64 else 128) // scheme.activation.itemsize


def stages(block_m: int, block_n: int, block_k: int, scheme: Scheme) -> int:
    """Stages that keep `BYTES_IN_FLIGHT` of the weight in flight, or fewer, so that two CTAs fit on an SM."""
    if by_fma(scheme):
        return 3
    wanted = 1 + BYTES_IN_FLIGHT // (block_n * block_k * scheme.activation.itemsize)
    while shared_bytes(block_m, block_n, block_k, wanted, scheme) > SHARED_BYTES_PER_CTA // 2 - 1024:
        wanted -= 1
    return wanted


def registers(block_m: int, block_n: int, block_k: int, num_warps: int, scheme: Scheme) -> int:
    """Registers of a thread: accumulators, and without tensor cores both tiles."""
    values = block_m * block_n + (block_k * (block_m + block_n) if by_fma(scheme) else 0)
    return int(cdiv(values, 32 * num_warps)) + ADDRESS_REGISTERS


def shared_bytes(block_m: int, block_n: int, block_k: int, num_stages: int, scheme: Scheme) -> int:
    """Bytes of the staged tiles: every stage if wgmma reads one; one fewer if mma.sync or FMAs read registers."""
    staged = num_stages if uses_wgmma(block_m, scheme) else num_stages - 1
    return staged * (block_m + block_n) * block_k * scheme.activation.itemsize


@triton.jit
def store_tile(
    accumulator, rows, columns, bias_ptr, residual_ptr, out_ptr, M, N, stride_rm, stride_om,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Stores `accumulator` (rows, columns) fp32 + bias + residual, rounded once; `rows` and `columns` are int64."""
    accumulator = add_bias_and_residual(
        accumulator, bias_ptr, residual_ptr, stride_rm, rows, columns, M, N, HAS_BIAS, HAS_RESIDUAL
    )
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(
        out_ptr + rows[:, None] * stride_om + columns[None, :], accumulator.to(out_ptr.dtype.element_ty), mask=mask
    )

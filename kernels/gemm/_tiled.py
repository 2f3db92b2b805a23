"""What the tiled Triton kernels of gemm share: tile order, epilogue, traffic, and constants of a launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from rooflab.kernels.gemm._operands import panels_traffic
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """a once, b once per group of row panels, without reuse from L2."""
    return panels_traffic(inputs, inputs.config.block_m * inputs.config.group_m)


@triton.jit
def add_bias_and_residual(
    accumulator, bias_ptr, residual_ptr, stride_rm, rows, columns, M, N,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """accumulator + bias + residual in fp32; `rows` are int64."""
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        residual = tl.load(residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=mask, other=0.0)
        accumulator += residual.to(tl.float32)
    return accumulator


def constants(of: Arguments) -> dict[str, Any]:
    """What a launch compiles into the device code."""
    has = {"HAS_BIAS": of.bias is not None, "HAS_RESIDUAL": of.residual is not None}
    return {**has, "PRECISION": of.precision, **of.config.launch_arguments}


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

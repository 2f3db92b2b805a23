"""Provides host helpers for gemm_fp8's kernels: memory traffic, scales, TMA maps, and checks of the operands."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import ALIGNMENT, address_of
from rooflab.kernels.gemm._operands import stored_operands
from rooflab.kernels.gemm_fp8._configs import BLOCK_K
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

HAS_BLOCK_SCALES, ONE_EACH = "a_scale[1:]", "not a_scale[1:]"
"""The `holds` of kernels that take one kind of scales: block scales have a second dimension, so a second stride."""


def block_scaled(a_scale: torch.Tensor) -> bool:
    """Returns whether the operands have block scales.  Otherwise each operand has a single scale."""
    return a_scale.ndim == 2


def scale_strides(of: Arguments) -> tuple[int, ...]:
    """Returns the strides of the block scales of `a` and `b`, or four zeros if each operand has a single scale."""
    return (*of.a_scale.stride(), *of.b_scale.stride()) if block_scaled(of.a_scale) else (0, 0, 0, 0)


def why_no_tma(inputs: Arguments) -> str | None:
    """Returns why TMA and wgmma cannot read `a` or `b`, or None.  cuBLASLt and DeepGEMM have the same conditions."""
    for operand, matrix in (("a", inputs.a), ("b", inputs.b.mT)):
        rows, columns = matrix.shape
        row_stride, address_offset = matrix.stride(0), address_of(matrix) % ALIGNMENT
        is_aligned = matrix.stride(1) == 1 and row_stride % ALIGNMENT == 0 == address_offset
        if not is_aligned or (rows > 1 and row_stride < columns):
            layout = f"stride 1 along K, in rows that do not overlap, at multiples of {ALIGNMENT} bytes, for fp8 wgmma"
            found_layout = f"strides {getattr(inputs, operand).stride()} and address % {ALIGNMENT} = {address_offset}"
            return f"{operand}: expected {layout}, got {found_layout}"
    return None


def why_not_operands(inputs: Arguments, stores: bool = False) -> str | None:
    """Returns the reason why TMA and wgmma cannot read `a` or `b`, or None.  With `stores`, also checks whether TMA can
    store the output.  Empty matrices always give None."""
    a, b = inputs.a, inputs.b
    if not a.numel() or not b.numel():
        return None
    if stores and len(a) > 1 and 2 * b.shape[1] % ALIGNMENT:
        expected_size = f"N of whole {ALIGNMENT} bytes of the result, so that TMA can store its rows"
        return f"b: expected {expected_size}, got {b.shape[1]}"
    return why_no_tma(inputs)


def by_maps(of: Arguments) -> Any:
    """Computes the launch arguments of a call from its shapes, strides and options.  Returns the functions that make
    the TMA maps of `a` and `b`, and then the grid, the sizes (M, N, K), the strides of the scales and the row stride of
    the result."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    stored_a, stored_b = stored_operands(of.a, of.b)
    a_map, b_map = stored_a.map(config.block_m, BLOCK_K), stored_b.map(BLOCK_K, config.block_n)
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n),)
    return a_map, b_map, grid, (M, N, K), scale_strides(of), of.c.stride(0)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of each operand once.  A GEMM with a good tile order comes close to this traffic."""
    a, b = inputs.a, inputs.b
    return Traffic(nbytes(a, b, inputs.a_scale, inputs.b_scale, inputs.bias), 2 * a.shape[0] * b.shape[1])


def tiles_traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of `a` once, and of `b` once per `group_m` rows of tiles, because L2 may not keep `b`."""
    config, operand_traffic = inputs.config, traffic(inputs)
    extra_b_reads = max(1, cdiv(len(inputs.a), config.block_m * config.group_m)) - 1
    return Traffic(operand_traffic.read_bytes + extra_b_reads * nbytes(inputs.b), operand_traffic.write_bytes)

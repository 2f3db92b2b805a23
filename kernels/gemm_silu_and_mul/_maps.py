"""How the TMA kernels of gemm_silu_and_mul describe their operands, which they refuse, and the traffic of tiles."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import ALIGNMENT, map_maker
from rooflab.kernels.gemm._tma import Stored, stored_as
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def _row_bytes(matrix: torch.Tensor) -> str:
    return " and ".join(str(stride * matrix.element_size()) for stride in matrix.stride())


def why_no_maps(inputs: Arguments) -> str | None:
    """Why TMA cannot load these operands or store a new result of them, or None."""
    a, b = inputs.a, inputs.b
    if not a.numel() or not b.numel():
        return None
    wanted = f"expected stride 1 along K, and an address and row stride of whole {ALIGNMENT} bytes, for TMA"
    for name, matrix, transposed in (("a", a, False), ("b", b, True)):
        if stored_as(matrix, transposed) is None:
            return f"{name}: {wanted}, got strides of {_row_bytes(matrix)} bytes; gemm_silu_and_mul/fused takes any"
    size = b.shape[1] // 2 * b.element_size()
    if a.shape[0] > 1 and size % ALIGNMENT:
        return (
            f"b: expected I of whole {ALIGNMENT} bytes, so that TMA can store the result's rows, got {size} bytes; "
            "gemm_silu_and_mul/fused takes any"
        )
    return None


def stored(of: Arguments) -> tuple[Stored, Stored, Stored]:
    """a, the (2 I, K) weight and out as rows in memory.  Raises `ValueError` if TMA cannot store `out`."""
    a, weight, out = stored_as(of.a, False), stored_as(of.b, True), stored_as(of.out, False)
    if out is None:
        raise ValueError(
            f"out: expected an address and row stride of whole {ALIGNMENT} bytes for TMA, got strides of "
            f"{_row_bytes(of.out)} bytes; gemm_silu_and_mul/fused takes any"
        )
    assert a is not None and weight is not None, "refused before"
    return a, weight, out


def by_maps(of: Arguments) -> Any:
    """Of a layout: what makes the maps of a, the weight as (2, I, K) and out; sizes."""
    config = of.config
    a, weight, out = stored(of)
    half = weight.rows // 2
    shape, strides = [2, half, weight.columns], [half * weight.stride, weight.stride, 1]
    both = map_maker(TensorDescriptor, shape, strides, [2, config.block_i, config.block_k])
    maps = a.map(config.block_m, config.block_k), both, out.map(config.block_m, config.block_i)
    return *maps, (a.rows, half, weight.columns)


def zeros(of: Arguments) -> None:
    """Writes zeros to out, for K = 0: `empty` of kernels that need a k."""
    of.out.zero_()


def traffic(inputs: Arguments) -> Traffic:
    """a once, b once per group of row panels without reuse from L2, and the result."""
    a, b, config = inputs.a, inputs.b, inputs.config
    M = a.shape[0]
    panels = cdiv(M, config.block_m * config.group_m)
    return Traffic(nbytes(a) + panels * nbytes(b), M * (b.shape[1] // 2) * a.element_size())

"""How the TMA kernels of gemm describe a matrix, and which matrices they refuse."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._layouts import layout_of
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import ALIGNMENT, STRIDE_LIMIT, MapMaker, address_of, map_maker
from rooflab.reference.spec import Arguments


class Stored(NamedTuple):
    """A matrix in memory as rows of contiguous elements."""

    rows: int
    columns: int
    stride: int
    """Elements from one row to the next."""
    transposed: bool
    """Whether these rows are the operand's columns."""

    def map(self, rows: int, columns: int, kind: Any = TensorDescriptor, dtype: Any = None) -> MapMaker:
        """Makes maps for tiles of the operand, `rows` by `columns`; Gluon's name the layout of a `dtype`."""
        box = [columns, rows] if self.transposed else [rows, columns]
        layout = () if dtype is None else (layout_of(tuple(box), dtype),)
        return map_maker(kind, [self.rows, self.columns], [self.stride, 1], box, *layout)


def stored_as(matrix: torch.Tensor, transposed: bool) -> Stored | None:
    """`matrix` as rows (with `transposed` as columns) that a tensor map can describe, or None."""
    size = matrix.element_size()
    row_dim = 1 if transposed else 0
    rows, columns = matrix.shape[row_dim], matrix.shape[1 - row_dim]
    stride = matrix.stride(row_dim)
    if rows == 1:  # the stride of a single row has no meaning
        stride = cdiv(columns * size, ALIGNMENT) * ALIGNMENT // size
    neighbours = columns == 1 or matrix.stride(1 - row_dim) == 1
    aligned = address_of(matrix) % ALIGNMENT == 0 and stride * size % ALIGNMENT == 0
    if neighbours and aligned and stride >= columns and stride * size < STRIDE_LIMIT:
        return Stored(rows, columns, stride, transposed)
    return None


def stored(operand: torch.Tensor, k_dim: int) -> Stored | None:
    """`operand` for a tensor map, with K innermost if both orders are possible; None if neither is."""
    k_innermost = k_dim == 0
    return stored_as(operand, k_innermost) or stored_as(operand, not k_innermost)


def _refusal(name: str, matrix: torch.Tensor, instead: str) -> str:
    size = matrix.element_size()
    return (
        f"{name}: expected an address and row stride of whole {ALIGNMENT} bytes for TMA, stride 1 along rows that do "
        f"not overlap, got address % {ALIGNMENT} = {address_of(matrix) % ALIGNMENT} and strides of "
        f"{' and '.join(str(stride * size) for stride in matrix.stride())} bytes; gemm/{instead} takes any"
    )


def why_not_operands(a: torch.Tensor, b: torch.Tensor, precision: str) -> str | None:
    """Why TMA and wgmma cannot take the operands, or None."""
    wide = a.dtype == torch.float32
    if wide and precision != "tf32":
        return f"precision: expected tf32 with torch.float32 operands, got {precision}; gemm/pipelined takes it"
    if not a.numel() or not b.numel():
        return None
    for name, operand, k_dim in (("a", a, 1), ("b", b, 0)):
        matrix = stored(operand, k_dim)
        if matrix is None:
            return _refusal(name, operand, "pipelined")
        # wgmma reads 16-bit operands in both orders, wider operands only with K innermost (PTX ISA, wgmma.mma_async).
        if wide and matrix.transposed != (k_dim == 0):
            return f"{name}: expected stride 1 along K for wgmma in tf32, got strides {operand.stride()}; " + (
                "gemm/pipelined takes any"
            )
    return None


def why_not_output(a: torch.Tensor, b: torch.Tensor, instead: str) -> str | None:
    """Why TMA cannot store a new tensor for a b, or None."""
    if a.shape[0] == 1 or b.shape[1] * a.element_size() % ALIGNMENT == 0:
        return None
    return (
        f"b: expected N of whole {ALIGNMENT} bytes, so that TMA can store the result's rows, got {b.shape[1]} columns "
        f"of {a.element_size()} bytes; gemm/{instead} takes any"
    )


def why_not_residual(residual: torch.Tensor | None) -> str | None:
    """Why TMA cannot load the residual, or None."""
    if residual is not None and residual.numel() and stored_as(residual, False) is None:
        return (
            f"residual: expected an address and row stride of whole 16 bytes for TMA, got strides {residual.stride()}; "
            "gemm/pipelined takes any"
        )
    return None


def why_not_loaded(inputs: Arguments) -> str | None:
    """`unsupported` for a kernel that loads by TMA."""
    return why_not_operands(inputs.a, inputs.b, inputs.precision)


def why_not_loaded_and_stored(inputs: Arguments) -> str | None:
    """`unsupported` for a kernel that also stores by TMA."""
    return why_not_loaded(inputs) or why_not_output(inputs.a, inputs.b, "tma")


def why_not_moved(inputs: Arguments) -> str | None:
    """`unsupported` for a kernel that also loads the residual by TMA."""
    a, b, residual = inputs.a, inputs.b, inputs.residual
    return why_not_loaded(inputs) or why_not_output(a, b, "pipelined") or why_not_residual(residual)


def stored_operands(a: torch.Tensor, b: torch.Tensor) -> tuple[Stored, Stored]:
    """Both operands for tensor maps, after `why_not_operands` gave no reason."""
    left, right = stored(a, 1), stored(b, 0)
    assert left is not None and right is not None, "refused before"
    return left, right


def stored_output(c: torch.Tensor, instead: str) -> Stored:
    """`c` for a tensor map.  Raises `ValueError` if TMA cannot store it."""
    matrix = stored_as(c, False)
    if matrix is None:
        raise ValueError(_refusal("out", c, instead))
    return matrix

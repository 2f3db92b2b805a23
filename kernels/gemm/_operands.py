"""Provides helpers for matrix operands: TMA maps, memory traffic, strides, launch constants, and checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import ALIGNMENT, STRIDE_LIMIT, MapMaker, address_of
from rooflab.kernels.lib.tma import layout_of, map_maker
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

VECTOR_BYTES = 16
"""The bytes of a thread's widest load.  This is also the least that cp.async (cg) and TMA copy."""
GLUON_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of each operand once.  This is exact for a GEMV, and nearly exact for a good order of tiles."""
    return panels_traffic(inputs, 0)


def panels_traffic(inputs: Arguments, rows: int) -> Traffic:
    """Counts the bytes of `a` once, and of `b` once for each `rows` rows of `a`.  If `rows` is 0, counts `b` once."""
    a, b = inputs.a, inputs.b
    M, N = a.shape[0], b.shape[1]
    b_read_count = -(-M // rows) if rows else 1
    read_bytes = nbytes(a, inputs.bias, getattr(inputs, "residual", None)) + b_read_count * b.nbytes
    return Traffic(read_bytes, M * N * a.element_size())


def tiles_traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes that a tiled matrix product moves. `a` counts once. `b` counts once for each group of output
    tiles. A group has `group_m` rows of tiles, and its rows of `a` stay in L2."""
    return panels_traffic(inputs, inputs.config.block_m * inputs.config.group_m)


def constants(of: Arguments, *mapped: Stored) -> dict[str, Any]:
    """Returns the constants of a tiled Triton kernel.  With tensor maps, adds the memory order of `a` and `b`."""
    addend_flags = {"HAS_BIAS": of.bias is not None, "HAS_RESIDUAL": of.residual is not None}
    transpose_flags = {f"{name}_TRANSPOSED": matrix.transposed for name, matrix in zip("AB", mapped, strict=False)}
    return {**transpose_flags, **addend_flags, "PRECISION": of.precision, **of.config.launch_arguments}


def row_stride(addend: Tensor | None) -> int:
    """Returns the row stride of `addend` in elements. `addend` is the residual that a kernel adds to its result.
    Returns 0 if it is None."""
    return 0 if addend is None else addend.stride(0)


def epilogue_alone(of: Arguments) -> None:
    """Writes `bias + residual` to `c`.  A kernel calls this function if K is 0 and the kernel cannot run with K = 0."""
    fp32_sum = torch.zeros(of.c.shape, dtype=torch.float32, device=of.c.device)
    for addend in (of.bias, getattr(of, "residual", None)):
        if addend is not None:
            fp32_sum += addend
    of.c.copy_(fp32_sum)


class Stored(NamedTuple):
    """A matrix in memory, described as rows of contiguous elements."""

    rows: int
    columns: int
    stride: int
    """The number of elements from a row to the next row."""
    transposed: bool
    """Whether the rows in memory are the columns of the operand."""

    def map(self, rows: int, columns: int, gluon: torch.dtype | None = None) -> MapMaker:
        """Returns a function that makes a tensor map with boxes of `rows` by `columns`, for Triton or for Gluon."""
        box_shape = [columns, rows] if self.transposed else [rows, columns]
        shape, strides = [self.rows, self.columns], [self.stride, 1]
        if gluon is None:
            return map_maker(TensorDescriptor, shape, strides, box_shape)
        return map_maker(GluonDescriptor, shape, strides, box_shape, layout_of(tuple(box_shape), GLUON_DTYPES[gluon]))


def stored_as(matrix: Tensor, transposed: bool) -> Stored | None:
    """Describes `matrix`, or its transpose, as contiguous rows for TMA.  Returns None if TMA cannot load it."""
    item_bytes, row_dim = matrix.element_size(), 1 if transposed else 0
    rows, columns = matrix.shape[row_dim], matrix.shape[1 - row_dim]
    stride = matrix.stride(row_dim)
    if rows == 1:  # the stride of a single row has no meaning
        stride = cdiv(columns * item_bytes, ALIGNMENT) * ALIGNMENT // item_bytes
    is_contiguous = columns == 1 or matrix.stride(1 - row_dim) == 1
    is_aligned = address_of(matrix) % ALIGNMENT == 0 and stride * item_bytes % ALIGNMENT == 0
    if is_contiguous and is_aligned and stride >= columns and stride * item_bytes < STRIDE_LIMIT:
        return Stored(rows, columns, stride, transposed)
    return None


def stored(operand: Tensor, k_dim: int) -> Stored | None:
    """Describes `operand` as contiguous rows for TMA, along K if possible.  Returns None if TMA cannot load it."""
    return stored_as(operand, k_dim == 0) or stored_as(operand, k_dim != 0)


def stored_operands(a: Tensor, b: Tensor) -> tuple[Stored, Stored]:
    """Returns the memory layouts of `a` and `b` for TMA, as rows of contiguous elements. If `b` has one matrix per
    expert, uses the first matrix. Asserts that TMA can load both operands."""
    stored_a, stored_b = stored(a, 1), stored(b if b.ndim == 2 else b[0], 0)
    assert stored_a is not None and stored_b is not None, "refused before"
    return stored_a, stored_b


def stored_output(out: Tensor) -> Stored:
    """Describes the output `out` as contiguous rows for TMA.  Raises `ValueError` if TMA cannot store it."""
    if (matrix := stored_as(out, False)) is None:
        raise ValueError(_refusal("out", out))
    return matrix


def _refusal(name: str, matrix: Tensor, along: str = "") -> str:
    stride_text = " and ".join(str(stride * matrix.element_size()) for stride in matrix.stride())
    address_offset = address_of(matrix) % ALIGNMENT
    return (
        f"{name}: expected an address and row stride of whole {ALIGNMENT} bytes for TMA, stride 1 along {along}rows "
        f"that do not overlap, got address % {ALIGNMENT} = {address_offset} and strides of {stride_text} bytes"
    )


def why_not_by_tma(
    inputs: Arguments, *, stores: bool = False, gated: bool = False, residual: bool = False
) -> str | None:
    """Returns the reason why a kernel cannot load the matrices `a` and `b` by TMA, or None if it can.

    wgmma needs `a` and `b` contiguous along K, except for 16-bit operands of the op gemm (PTX ISA, wgmma.mma_async).
    With `stores`, TMA also stores the result.  With `residual`, it also loads the residual.  With `gated`, the result
    has half the columns of `b`.
    """
    a, b, fp32_precision = inputs.a, inputs.b, getattr(inputs, "precision", None)
    is_fp32 = a.dtype == torch.float32
    if is_fp32 and fp32_precision == "ieee":
        return f"precision: expected tf32 with torch.float32 operands, got {fp32_precision}"
    if not a.numel() or not b.numel():
        return None
    needs_k_major = is_fp32 or fp32_precision is None
    for operand_name, operand, matrix, k_dim in (("a", a, a, 1), ("b", b, b if b.ndim == 2 else b[0], 0)):
        stored_matrix = stored_as(matrix, k_dim == 0) if needs_k_major else stored(matrix, k_dim)
        pitch = operand.stride(0) * operand.element_size() if operand.ndim == 3 and len(operand) > 1 else ALIGNMENT
        if stored_matrix is None or pitch % ALIGNMENT or not 0 < pitch < STRIDE_LIMIT:
            return _refusal(operand_name, operand, "K, in " if needs_k_major else "")
    columns = b.shape[-1] // (2 if gated else 1)
    if stores and a.shape[0] > 1 and columns * a.element_size() % ALIGNMENT:
        expected_size = f"{'I' if gated else 'N'} of whole {ALIGNMENT} bytes, so that TMA can store the result's rows"
        return f"b: expected {expected_size}, got {columns} columns of {a.element_size()} bytes"
    if stores and b.ndim == 3 and len(b) > 1 and b.stride(0) != b.shape[2] * stored_operands(a, b)[1].stride:
        return f"b: expected experts that follow one another in memory, got strides {b.stride()}"
    if residual and (x := inputs.residual) is not None and x.numel() and stored_as(x, False) is None:
        return _refusal("residual", x)
    return None


def weight_stride(operand: Tensor, row_dim: int) -> int:
    """Returns the row stride of `operand`, in elements, or 0 for a single row.  `row_dim` is the rows' dimension."""
    return operand.stride(row_dim) if operand.shape[row_dim] > 1 else 0


def row_strides(of: Arguments) -> tuple[int, ...]:
    """Returns the row strides, in elements, of `a`, `b.mT`, the residual and `c`."""
    return weight_stride(of.a, 0), weight_stride(of.b, 1), row_stride(of.residual), of.c.stride(0)


def alignment_bytes(a: Tensor, b: Tensor, whole_k: bool) -> int:
    """Returns the largest vector load in bytes, a power of two up to 16, that fits the operands.  It divides the
    address of each row of `a` and of `b.mT`.  With `whole_k`, it also divides the number of bytes in a row.  If K is 0,
    returns 16."""
    K, address_bits = a.shape[1], VECTOR_BYTES
    for operand, row_dim in ((a, 0), (b, 1)) if K else ():
        size = operand.element_size()
        address_bits |= weight_stride(operand, row_dim) * size | address_of(operand) | (K * size if whole_k else 0)
    return address_bits & -address_bits


def along_k(*operands: str) -> dict[str, str]:
    """Returns conditions on a kernel's calls: the matrices in `operands` must be contiguous along K.  The result maps
    each condition to its meaning in words.  The decorator `kernel`, which registers a kernel, takes it as the argument
    `holds`."""
    return {f"{operand}[{1 if operand == 'a' else 0}] == 1 or K <= 1": "stride 1 along K" for operand in operands}

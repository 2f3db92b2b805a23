"""What the launchers of gemm share: traffic, strides, constants of a launch, and which operands they refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._tma import address_of
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

VECTOR_BYTES = 16
"""The widest load of a thread, and the least that cp.async (cg) and TMA copy."""


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once: true of a GEMV, and nearly true of the best tile order."""
    return panels_traffic(inputs, 0)


def panels_traffic(inputs: Arguments, rows: int) -> Traffic:
    """a once, and b once for each `rows` rows of a; with 0 rows b once."""
    a, b = inputs.a, inputs.b
    M, N = a.shape[0], b.shape[1]
    times = -(-M // rows) if rows else 1
    read = nbytes(a, inputs.bias, getattr(inputs, "residual", None)) + times * b.nbytes
    return Traffic(read, M * N * a.element_size())


def tiles_traffic(inputs: Arguments) -> Traffic:
    """L2 keeps a group's rows of a; b is read again for each group of row panels."""
    return panels_traffic(inputs, inputs.config.block_m * inputs.config.group_m)


def constants(of: Arguments) -> dict[str, Any]:
    """What a launch of a tiled Triton kernel compiles into the device code."""
    has = {"HAS_BIAS": of.bias is not None, "HAS_RESIDUAL": of.residual is not None}
    return {**has, "PRECISION": of.precision, **of.config.launch_arguments}


def row_stride(addend: Tensor | None) -> int:
    """Elements from row to row of a residual; 0 without one."""
    return 0 if addend is None else addend.stride(0)


def epilogue_alone(of: Arguments) -> None:
    """Writes bias + residual to c, for K = 0: `empty` of kernels that need a k."""
    total = torch.zeros(of.c.shape, dtype=torch.float32, device=of.c.device)
    for addend in (of.bias, getattr(of, "residual", None)):
        if addend is not None:
            total += addend
    of.c.copy_(total)


def weight_stride(operand: Tensor, row_dim: int) -> int:
    """Elements from row to row; 0 for a single row, whose stride has no meaning."""
    return operand.stride(row_dim) if operand.shape[row_dim] > 1 else 0


def row_strides(of: Arguments) -> tuple[int, ...]:
    """Elements from row to row of a, of b.mT, of the residual and of c."""
    return weight_stride(of.a, 0), weight_stride(of.b, 1), row_stride(of.residual), of.c.stride(0)


def alignment_bytes(a: Tensor, b: Tensor, whole_k: bool) -> int:
    """The largest power of two, at most 16, that divides the address of every row of a and of b.mT.

    With `whole_k` it also divides the bytes of K, so a row is a whole number of loads.  For K = 0 it is 16, because
    nothing is read.
    """
    K, bits = a.shape[1], VECTOR_BYTES
    for operand, row_dim in ((a, 0), (b, 1)) if K else ():
        size = operand.element_size()
        bits |= weight_stride(operand, row_dim) * size | address_of(operand) | (K * size if whole_k else 0)
    return bits & -bits


def along_k(*operands: str) -> dict[str, str]:
    """`holds` of a kernel that reads these operands along K, where they must be contiguous."""
    return {f"{name}[{1 if name == 'a' else 0}] == 1 or K <= 1": "stride 1 along K" for name in operands}

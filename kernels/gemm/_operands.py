"""What the launchers of gemm share: the traffic of kernels that read each operand once, and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once: true of a GEMV, and nearly true of the best tile order."""
    return panels_traffic(inputs, 0)


def panels_traffic(inputs: Arguments, rows: int) -> Traffic:
    """a once, and b once per `rows` rows of a, without reuse from L2; with 0 rows b once."""
    a, b = inputs.a, inputs.b
    M, N = a.shape[0], b.shape[1]
    times = -(-M // rows) if rows else 1
    read = nbytes(a, inputs.bias, getattr(inputs, "residual", None)) + times * b.nbytes
    return Traffic(read, M * N * a.element_size())


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

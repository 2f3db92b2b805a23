"""Calls QuACK's GEMM for Hopper, for comparison (CuTe DSL, https://github.com/Dao-AILab/quack, `quack-kernels`).

QuACK tunes itself: the first call of each shape and dtype measures 44 configs on Hopper (0.6.4).  A time measured after
a warm-up does not contain this tuning.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._tma import ALIGNMENT, address_of
from rooflab.kernels.gemm._operands import epilogue_alone, traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments


def unsupported(inputs: Arguments) -> str | None:
    """Returns why QuACK does not support the operands, or None.  On Hopper, QuACK 0.6.4 needs row strides that are
    multiples of 16 bytes."""
    a, b, residual = inputs.a, inputs.b, inputs.residual
    if not a.numel() or not b.numel():
        return None
    if b.shape[1] * b.element_size() % ALIGNMENT:
        return f"b: expected N of whole {ALIGNMENT} bytes, got {b.shape[1]} columns"
    refusal_reason = _why_not("a", a, (1, 0)) or _why_not("b", b, (1, 0))
    return refusal_reason or (_why_not("residual", residual, (1,)) if residual is not None else None)


def check_out(of: Arguments) -> None:
    """Raises `ValueError` if QuACK cannot write to the tensor `c`."""
    if refusal_reason := _why_not("out", of.c, (1,)):
        raise ValueError(refusal_reason)


def _why_not(name: str, matrix: torch.Tensor, inner_dims: tuple[int, ...]) -> str | None:
    """Returns the reason why QuACK cannot use `matrix`, or None.  The matrix must be aligned, and contiguous along a
    dimension in `inner_dims`."""
    offset_bytes = address_of(matrix) % ALIGNMENT
    for dim in inner_dims:
        if matrix.stride(dim) == 1 and matrix.stride(1 - dim) * matrix.element_size() % ALIGNMENT == 0 == offset_bytes:
            return None
    return (
        f"{name}: expected an address and row stride of whole {ALIGNMENT} bytes and stride 1 along rows, got address % "
        f"{ALIGNMENT} = {offset_bytes} and strides {matrix.stride()}"
    )


@kernel(
    role="peer",
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("quack",),
    dtypes={"a": HALF_DTYPES},
    unsupported=unsupported,
    aligned=("a", "b", "residual"),
    empty=epilogue_alone,
    bind=check_out,
    traffic=traffic,
)
def quack(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *, residual: Tensor | None, bound: None) -> None:
    """Computes `a @ b + bias + residual` by QuACK.  Bias and residual together need QuACK 0.6.2."""
    quack_module: Any = import_module("quack.gemm_interface")
    bias_args = {} if bias is None else {"bias": bias}
    if residual is None:
        quack_module.gemm(a, b, out=c, **bias_args)
    else:
        quack_module.gemm_add(a, b, residual, out=c, **bias_args)

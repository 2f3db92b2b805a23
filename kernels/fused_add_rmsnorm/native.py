"""Implements `native`, for the CPU, in C++: one call for sum and norm.  Several torch calls would take more time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.launcher import kernel
from rooflab.reference.fused_add_rmsnorm import SPEC
from rooflab.reference.spec import Arguments

SOURCE = Path(__file__).with_suffix(".cpp")
TYPES = "ippppppffi"


def shape(of: Arguments) -> Any:
    """Returns the sizes, strides and number of threads, as the array that the C++ function takes."""
    strides = (tensor.stride(0) for tensor in (of.x, of.residual, of.out, of.new_residual))
    return sizes(*of.x.shape, *strides, torch.get_num_threads())


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=SPEC.least,
    bind=shape,
    over="naive",
    shows={"": 'calls("naive").total >= 7 and calls("native").names.keys() <= {"empty", "empty_like"}'},
)
def native(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    new_residual: Tensor,
    *,
    eps: float,
    weight_offset: float,
    round_first: bool,
    bound: Any,
) -> None:
    """Computes `s = x + residual` and `rmsnorm(s)`.  The norm is in fp32, rounded once."""
    data_pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), new_residual.data_ptr()
    built(SOURCE, TYPES)(DTYPE_CODES[x.dtype], *data_pointers, bound, eps, weight_offset, round_first)

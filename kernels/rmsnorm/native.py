"""The kernel `native`, in C++ for the CPU, is one call.  At few rows, torch's calls take longer than the work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.fused_add_rmsnorm.native import SOURCE, TYPES
from rooflab.kernels.launcher import kernel
from rooflab.reference.rmsnorm import SPEC
from rooflab.reference.spec import Arguments


def shape(of: Arguments) -> Any:
    """Returns the sizes, strides and number of threads for a layout."""
    return sizes(*of.x.shape, of.x.stride(0), 0, of.out.stride(0), 0, torch.get_num_threads())


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=SPEC.least,
    bind=shape,
    over="naive",
    shows={"": 'calls("naive").total >= 6 and calls("native").names.keys() <= {"empty", "empty_like"}'},
)
def native(
    x: Tensor, weight: Tensor, out: Tensor, *, eps: float, weight_offset: float, round_first: bool, bound: Any
) -> None:
    """Computes `x / rms(x) * (weight + weight_offset)` in fp32, rounded once."""
    data_pointers = x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None
    built(SOURCE, TYPES)(DTYPE_CODES[x.dtype], *data_pointers, bound, eps, weight_offset, round_first)

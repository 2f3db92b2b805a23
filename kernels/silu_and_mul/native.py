"""The kernel `native`, in C++ for the CPU, reads `gate` and `up` once, in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.launcher import kernel
from rooflab.reference.silu_and_mul import SPEC
from rooflab.reference.spec import Arguments

SOURCE = Path(__file__).with_suffix(".cpp")


def shape(of: Arguments) -> Any:
    """Returns the sizes, strides and number of threads for a layout."""
    return sizes(*of.out.shape, of.x.stride(0), of.out.stride(0), torch.get_num_threads())


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=SPEC.least,
    bind=shape,
    over="naive",
    shows={"": 'calls("naive").total >= 3 and calls("native").names.keys() <= {"empty", "empty_like"}'},
)
def native(x: Tensor, out: Tensor, *, bound: Any) -> None:
    """Computes `silu(gate) * up` in fp32, rounded once."""
    run(x, out, bound, gelu=False)


def run(x: Tensor, out: Tensor, bound: Any, gelu: bool) -> None:
    """Computes `silu(gate) * up`, or `gelu(gate) * up` if `gelu`."""
    built(SOURCE, "ipppi")(DTYPE_CODES[x.dtype], x.data_ptr(), out.data_ptr(), bound, gelu)

"""For the CPU, in C++: one pass over gate and up, which are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._native import DTYPES, Layouts, built, sizes
from rooflab.kernels.registry import register
from rooflab.kernels.silu_and_mul._operands import check_operands, traffic

SOURCE = Path(__file__).with_suffix(".cpp")
_layouts = Layouts()


@register(op="silu_and_mul", name="native", role="optimized", backend="cpp", devices=("cpu",), traffic=traffic)
def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up in fp32, rounded once.

    x: (T, 2 I), gate then up; returns (T, I).  Raises `ValueError` on a wrong shape or dtype.
    """
    return run(x, out, gelu=False)


def run(x: torch.Tensor, out: torch.Tensor | None, gelu: bool) -> torch.Tensor:
    """The activation of the gate, silu or gelu, times up."""
    if out is None:
        out = torch.empty((x.shape[0], x.shape[-1] // 2), dtype=x.dtype)
    shape = _layouts.of(_shape, (x, out))
    built(SOURCE, "ipppi")(DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), shape, gelu)
    return out


def _shape(x: torch.Tensor, out: torch.Tensor) -> Any:
    T, I = check_operands(x)
    output(out, (T, I), x)
    return sizes(T, I, x.stride(0), out.stride(0), torch.get_num_threads())

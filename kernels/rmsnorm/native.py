"""For the CPU, in C++: one call, where torch makes several that each cost more than the work of a decode step."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._native import DTYPES, Layouts, built, sizes
from rooflab.kernels.fused_add_rmsnorm.native import SOURCE, TYPES
from rooflab.kernels.registry import register
from rooflab.kernels.rmsnorm._operands import check_operands, traffic

_layouts = Layouts()


@register(op="rmsnorm", name="native", role="optimized", backend="cpp", devices=("cpu",), traffic=traffic)
def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> torch.Tensor:
    """x / rms(x) * (weight + weight_offset) in fp32, rounded once.

    x: (T, H); weight: (H,); returns (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    shape = _layouts.of(_shape, (x, weight, out))
    pointers = x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None
    built(SOURCE, TYPES)(DTYPES[x.dtype], *pointers, shape, eps, weight_offset, round_first)
    return out


def _shape(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Any:
    T, H = check_operands(x, weight)
    output(out, (T, H), x)
    return sizes(T, H, x.stride(0), 0, out.stride(0), 0, torch.get_num_threads())

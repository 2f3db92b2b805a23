"""For the CPU, in C++: the sum and the norm in one call; torch makes several that each cost more than the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rooflab.kernels._native import DTYPES, Layouts, built, sizes
from rooflab.kernels.fused_add_rmsnorm._operands import check_operands, outputs, traffic
from rooflab.kernels.registry import register

SOURCE = Path(__file__).with_suffix(".cpp")
TYPES = "ippppppffi"
_layouts = Layouts()


@register(op="fused_add_rmsnorm", name="native", role="optimized", backend="cpp", devices=("cpu",), traffic=traffic)
def fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(x + residual), x + residual); the norm in fp32, rounded once.

    x, residual: (T, H); weight: (H,); returns two (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    normed, total = (torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)) if out is None else out
    shape = _layouts.of(_shape, (x, residual, weight, normed, total))
    pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), normed.data_ptr(), total.data_ptr()
    built(SOURCE, TYPES)(DTYPES[x.dtype], *pointers, shape, eps, weight_offset, round_first)
    return normed, total


def _shape(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, total: torch.Tensor
) -> Any:
    T, H = check_operands(x, residual, weight)
    outputs((normed, total), (T, H), x)
    return sizes(T, H, x.stride(0), residual.stride(0), normed.stride(0), total.stride(0), torch.get_num_threads())

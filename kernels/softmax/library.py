"""torch's softmax."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.registry import register
from rooflab.kernels.softmax._operands import check_operands, traffic


@register(op="softmax", name="library", role="library", backend="torch", traffic=traffic)
def softmax(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.softmax` along rows, which computes in fp32.

    x: (T, H), each row with a finite value; returns (T, H).  Raises `ValueError` on a wrong shape or dtype.
    """
    shape = check_operands(x)
    return torch.softmax(x, -1, out=None if out is None else output(out, shape, x))

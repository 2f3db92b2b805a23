"""The two torch calls that a user would make without this op: gelu, then the product."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._traffic import steps
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.silu_and_mul._operands import check_operands
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The first call writes gelu(gate) and the second reads it back."""
    half = nbytes(inputs.x) / 2
    return steps((half, half), (2 * half, half))


@register(op="gelu_and_mul", name="library", role="library", backend="torch", traffic=traffic)
def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up with `gelu` and `mul`; gelu(gate) is rounded to the dtype in between.

    x: (T, 2 I); returns (T, I).  Raises `ValueError` on a wrong shape or dtype.
    """
    T, I = check_operands(x)
    if out is not None:
        output(out, (T, I), x)
    return torch.mul(torch.nn.functional.gelu(x[:, :I], approximate="tanh"), x[:, I:], out=out)

"""Implements torch.compile's kernel for comparison.  Liger is left out: it needs `gate` and `up` without row gaps."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu

from rooflab.kernels._peers import peer


@peer()
def compiled(x: Tensor) -> Tensor:
    """Computes the op's formula step by step.  torch.compile fuses the steps."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(x.dtype)

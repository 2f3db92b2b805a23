"""Over naive: all parts in one pass, with a running maximum of their log-sum-exps.

The device code is `kernels/lib/merge.py`, because mla_decode/split_kv ends with the same launch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.merge import fused_kernel, launch
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every part is read once, and the result written."""
    outs, lses = inputs.outs, inputs.lses
    return Traffic(nbytes(outs, lses), nbytes(outs, lses) // outs.shape[0])


def without_values(of: Arguments) -> None:
    """Heads without values have their sums of weights."""
    of.lse.copy_(torch.logsumexp(of.lses.masked_fill(of.lses == math.inf, -math.inf), dim=0))


@kernel(
    backend="triton", traffic=traffic, empty=without_values,
    bind=lambda of: launch(of.outs, of.lses, of.out, of.lse),
    over="naive", shows={"": (
        'calls("naive").total >= 8 and launched == 1; loop.LDG_E_128 == 4 and loop.global_store == 0'
    )},
)  # fmt: skip
def fused(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, bound: Any) -> None:
    """One pass over the parts, four at once."""
    programs, numbers, constants = bound
    fused_kernel[(programs,)](outs, lses, out, lse, *numbers, **constants)

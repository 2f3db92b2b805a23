"""Implements the CPU kernel `native` in C++: the loop of `silu_and_mul/native`, with gelu in place of silu."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.silu_and_mul.native import run, shape
from rooflab.reference.gelu_and_mul import SPEC


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=SPEC.least,
    bind=shape,
    over="naive",
    shows={"": 'calls("naive").total >= 8 and calls("native").names.keys() <= {"empty", "empty_like"}'},
)
def native(x: Tensor, out: Tensor, *, bound: Any) -> None:
    """Computes `gelu(gate) * up`, with the tanh form of gelu, in fp32, rounded once.  `x` is `[gate | up]`."""
    run(x, out, bound, gelu=True)

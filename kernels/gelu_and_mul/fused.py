"""Implements `fused`, the version after `naive`: the code of `silu_and_mul/fused`, with gelu in place of silu."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.silu_and_mul.fused import launch
from rooflab.reference.gelu_and_mul import SPEC


@kernel(
    backend="triton",
    traffic=SPEC.least,
    over="naive",
    shows={
        "": (
            'calls("naive").total >= 11 and launched == 1; '
            "LDG_E_128 == global_load == 2 and STG_E_128 == global_store == 1; not loops; F2F + F2FP == 4"
        )
    },
)
def fused(x: Tensor, out: Tensor) -> None:
    """Computes `gelu(gate) * up`, with the tanh form of gelu, in fp32, rounded once.  `x` is `[gate | up]`."""
    launch(x, out, gelu=True)

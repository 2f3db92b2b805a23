"""Over naive: the program of `silu_and_mul/fused` with gelu in place of silu (`lib/gated.py`)."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.gated import TUNING, Config, launch
from rooflab.kernels.silu_and_mul._traffic import traffic


@kernel(backend="triton", traffic=traffic, tuning=TUNING)
def fused(x: Tensor, out: Tensor, *, config: Config) -> None:
    """gelu(gate) * up in fp32, in its tanh form, rounded once."""
    launch(x, out, config, gelu=True)

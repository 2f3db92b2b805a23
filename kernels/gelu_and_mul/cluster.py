"""Implements `cluster`, the version after `fused`: several 16-byte vectors per thread in flight, short rows side by
side, a persistent grid, and outputs quantised in the same pass (`lib/rows.cu`).
"""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.lib.rows import Config, launch, rung


@rung("gelu_and_mul", "LDG_E_NA_128 >= 2 * below.LDG_E_128; barrier == 0")
def cluster(x: Tensor, out: Tensor, scale: Tensor | None, *, quantize: str | None, config: Config) -> None:
    """Computes `gelu(gate) * up`, with the tanh form of gelu, in fp32, rounded once."""
    launch("gelu_and_mul", x, out, second=x[:, out.shape[1] :], scale=scale, config=config)

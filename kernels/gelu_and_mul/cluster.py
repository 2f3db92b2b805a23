"""Implements `cluster`, the version after `fused`, in CUDA C++ (`lib/rows.cu`).  A thread has several 16-byte vectors
in flight, and a CTA has several short rows.  The grid is persistent, and the same pass quantises outputs.
"""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.lib.rows import Config, launch, rung


@rung("gelu_and_mul", "LDG_E_NA_128 >= 2 * below.LDG_E_128; barrier == 0")
def cluster(x: Tensor, out: Tensor, scale: Tensor | None, *, quantize: str | None, config: Config) -> None:
    """Computes `gelu(gate) * up`, with the tanh form of gelu, in fp32, rounded once.  `x` is `[gate | up]`."""
    launch("gelu_and_mul", x, out, second=x[:, out.shape[1] :], scale=scale, config=config)

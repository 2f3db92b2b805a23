"""The kernel `cluster` improves on `fused`: a thread has several 16-byte vectors in flight, and short rows share a CTA.
The grid is persistent.  The same pass may quantise outputs (`lib/rows.cu`).
"""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.lib.rows import Config, launch, rung


@rung("silu_and_mul", "LDG_E_NA_128 >= 2 * below.LDG_E_128; barrier == 0")
def cluster(x: Tensor, out: Tensor, scale: Tensor | None, *, quantize: str | None, config: Config) -> None:
    """Computes `silu(gate) * up` in fp32, rounded once."""
    launch("silu_and_mul", x, out, second=x[:, out.shape[1] :], scale=scale, config=config)

"""The kernel `cluster` improves on `fused`.  Registers of up to eight CTAs hold a row, up to 262,144 values.

The device code is `lib/rows.cu`.  Short rows share a CTA, and a cluster of CTAs shares a long row.  The CTAs add their
sums in distributed shared memory, without a second launch.  The same pass may quantise the output.
"""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.lib.rows import MAX_WIDTH, Config, launch, rung


@rung("rmsnorm", "LDG_E_NA_128 >= below.LDG_E_128", wide="T=4096,H=131072,eps=1e-05", limits={"H": MAX_WIDTH})
def cluster(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scale: Tensor | None,
    *,
    eps: float,
    weight_offset: float,
    round_first: bool,
    quantize: str | None,
    config: Config,
) -> None:
    """Computes `x / rms(x) * (weight + weight_offset)` in fp32, rounded once; `round_first` rounds `x / rms(x)` too."""
    launch(
        "rmsnorm",
        x,
        out,
        weight=weight,
        scale=scale,
        eps=eps,
        weight_offset=weight_offset,
        round_first=round_first,
        config=config,
    )

"""Over fused: a row of up to 262,144 values in the registers of up to eight CTAs; short rows share a CTA.

The device code is that of `lib/rows.cu`: a thread loads several vectors of 16 bytes before it uses the first.  A row
that is too long for one CTA is split over a cluster, whose sums meet in distributed shared memory without a second
launch.  Where there are many rows, the grid is persistent.  The same pass may quantise the output.
"""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.rows import MOST_WIDTH, Config, launch, tuning
from rooflab.reference.rmsnorm import SPEC


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), traffic=SPEC.least, tuning=tuning("rmsnorm"),
    limits={"H": MOST_WIDTH},
    over="fused", shows={
        "": (
            "LDG_E_NA_128 in (4, 8) and LDG == LDG__128; STG_E_128 == global_store == 4 and barrier >= 1; "
            "LDG_E_NA_128 >= below.LDG_E_128"
        ),
        "T=4096,H=131072,eps=1e-05": "LDG_E_NA_128 == 4 and UCGABAR_ARV >= 2 and barrier > 0 and stack_bytes == 0",
    },
)  # fmt: skip
def cluster(
    x: Tensor, weight: Tensor, out: Tensor, scale: Tensor | None, *,
    eps: float, weight_offset: float, round_first: bool, quantize: str | None, config: Config,
) -> None:  # fmt: skip
    """x / rms(x) * (weight + weight_offset) in fp32, rounded once; with `round_first`, x / rms is rounded too."""
    launch(
        "rmsnorm", x, out, weight=weight, scale=scale, eps=eps, weight_offset=weight_offset,
        round_first=round_first, config=config,
    )  # fmt: skip

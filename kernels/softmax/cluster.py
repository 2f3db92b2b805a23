"""Over fused: rows of any width in the registers of up to eight CTAs (`rmsnorm/cluster` says how)."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.rows import MOST_WIDTH, Config, launch, tuning
from rooflab.reference.softmax import SPEC


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), traffic=SPEC.least, tuning=tuning("softmax"),
    limits={"H": MOST_WIDTH},
    over="fused", shows={
        "": (
            "LDG_E_NA_128 in (4, 8) and LDG == LDG__128; STG_E_128 == global_store == 4 and barrier >= 1; "
            "LDG_E_NA_128 >= 2 * below.LDG_E_128"
        ),
        "T=4096,H=131072": "LDG_E_NA_128 == 4 and UCGABAR_ARV >= 2 and barrier > 0 and stack_bytes == 0",
    },
)  # fmt: skip
def cluster(x: Tensor, out: Tensor, *, config: Config) -> None:
    """exp(x - max) / sum in fp32, rounded once."""
    launch("softmax", x, out, config=config)

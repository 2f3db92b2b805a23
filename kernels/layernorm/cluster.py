"""Over fused: rows of any width in the registers of up to eight CTAs (`rmsnorm/cluster` says how)."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.rows import MOST_WIDTH, Config, launch, tuning
from rooflab.reference.layernorm import SPEC


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), traffic=SPEC.least, tuning=tuning("layernorm"),
    limits={"H": MOST_WIDTH},
    over="fused", shows={
        "": (
            "LDG_E_NA_128 in (4, 8) and LDG == LDG__128; STG_E_128 == global_store == 4 and barrier >= 1; "
            "LDG_E_NA_128 >= 2 * below.LDG_E_128 / 3"
        ),
        "T=4096,H=131072,bias=true,eps=1e-05": (
            "LDG_E_NA_128 == 4 and UCGABAR_ARV >= 2 and barrier > 0 and stack_bytes == 0"
        ),
    },
)  # fmt: skip
def cluster(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float, config: Config) -> None:
    """(x - mean) / sqrt(variance + eps) * weight + bias in fp32, rounded once; the variance after the mean."""
    launch("layernorm", x, out, weight=weight, bias=bias, eps=eps, config=config)

"""Over fused: rows of any width in the registers of up to eight CTAs (`rmsnorm/cluster` says how)."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.layernorm._traffic import traffic
from rooflab.kernels.lib.rows import MOST_WIDTH, Config, launch, tuning


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), traffic=traffic, tuning=tuning("layernorm"),
    limits={"H": MOST_WIDTH},
)  # fmt: skip
def cluster(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float, config: Config) -> None:
    """(x - mean) / sqrt(variance + eps) * weight + bias in fp32, rounded once; the variance after the mean."""
    launch("layernorm", x, out, weight=weight, bias=bias, eps=eps, config=config)

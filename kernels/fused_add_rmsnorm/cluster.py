"""Implements `cluster`, the version after `fused`: up to eight CTAs hold a row in registers (see `rmsnorm/cluster`)."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.lib.rows import Config, launch, rung


@rung("fused_add_rmsnorm", "LDG_E_NA_128 >= 4 * below.LDG_E_128 / 3", wide="T=4096,H=131072,eps=1e-05")
def cluster(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    new_residual: Tensor,
    scale: Tensor | None,
    *,
    eps: float,
    weight_offset: float,
    round_first: bool,
    quantize: str | None,
    config: Config,
) -> None:
    """Computes `s = x + residual` and `rmsnorm(s)` in fp32.  Rounds `s` before it computes the norm."""
    launch(
        "fused_add_rmsnorm",
        x,
        out,
        second=residual,
        weight=weight,
        sums=new_residual,
        scale=scale,
        eps=eps,
        weight_offset=weight_offset,
        round_first=round_first,
        config=config,
    )

"""What all attention launchers share: results, strides, and the softmax scale with its options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rooflab.kernels._attention_configs import padded
from rooflab.kernels._tma import MapMaker
from rooflab.kernels.lib import attention
from rooflab.reference.spec import Arguments

Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The result of attention: the output, or with `return_lse` the output and the log-sum-exp (LSE)."""
LOG2E = math.log2(math.e)
LN2 = math.log(2)
capped = attention.capped


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """What a launch passes in addition to tensors; a kernel's `bind` works it out once for a layout."""

    ctas: int
    """The grid: one axis, because only x may exceed 65,535 programs."""
    sizes: tuple[int, ...]
    """Lengths and heads."""
    scores: tuple[float | None, ...]
    """The window, and the numbers that turn a product into an exponent."""
    strides: tuple[int, ...]
    flags: dict[str, Any]
    """The constants of the device code, and launch options."""
    maps: tuple[MapMaker, ...] = ()
    """What makes the tensor maps of the tensors that TMA loads."""


def unseen(q: torch.Tensor, return_lse: bool) -> Returned:
    """The result of queries (..., D) that see no key: zeros, and with `return_lse` the log-sum-exp -inf."""
    out = torch.zeros_like(q)
    return (out, torch.full(q.shape[:-1], -math.inf, device=q.device)) if return_lse else out


def strides_of(x: torch.Tensor | None, rank: int) -> tuple[int, ...]:
    """The strides of a tensor that may be None; then zeros."""
    return (0,) * rank if x is None else x.stride()


def get_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """`softmax_scale`, or head_dim**-0.5 if that is None."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else float(softmax_scale)


SMALLEST_SCALE = 2.0**-100
"""Replaces a scale of 0, with which a masked score of -inf would become NaN; every weight is still 1."""


def never_zero(softmax_scale: float | None) -> float | None:
    """`softmax_scale` for torch, which multiplies a mask's -inf by it."""
    return SMALLEST_SCALE if softmax_scale == 0 else softmax_scale


def softmax_numbers(
    q: torch.Tensor, softmax_scale: float | None, softcap: float | None
) -> tuple[float, float, float, bool]:
    """`scale`, `factor`, `cap` and `NEGATED` for `lib.attention.weigh`; the factor is never negative."""
    scale = get_scale(q, softmax_scale)
    if softcap is not None:
        return scale, LOG2E, float(softcap), False
    return scale, max(abs(scale), SMALLEST_SCALE) * LOG2E, 0.0, scale < 0


def options(of: Arguments, keys: int) -> tuple[tuple[float, ...], dict[str, Any]]:
    """What a Triton kernel gets of a call's options: `window`, `scale`, `factor` and `cap`, and its constants.

    keys: the most keys of a sequence.
    """
    D = of.q.shape[-1]
    windowed = of.window is not None and of.window < keys  # a wider window hides nothing
    scale, factor, cap, negated = softmax_numbers(of.q, of.softmax_scale, of.softcap)
    constants = {
        "CAUSAL": of.causal, "WINDOW": windowed, "CAP": of.softcap is not None, "NEGATED": negated,
        "SINKS": of.sinks is not None, "LSE": of.return_lse, "HEAD_DIM": D, "BLOCK_D": padded(D),
        **of.config.launch_arguments,
    }  # fmt: skip
    return (of.window if windowed else 0, scale, factor, cap), constants

"""Provides helpers for all attention launchers: memory traffic, empty results, strides, and the softmax scale."""

from __future__ import annotations

import math
from typing import Any

import torch

from rooflab.kernels._attention_configs import padded
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

AttentionResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The result of attention: the output alone, or with `return_lse` the pair of the output and the log-sum-exp (LSE)."""
LOG2E = math.log2(math.e)
LN2 = math.log(2)


def traffic(inputs: Arguments) -> Traffic:
    """Returns the bytes that attention reads and writes. Each operand counts once, because a cache keeps a sequence's
    keys for all its queries. Dense keys `[B, S, H_kv, D]` outside all windows do not count. The result of fp8 operands
    is bf16."""
    q, k, read_share = inputs.q, inputs.k, 1
    if inputs.window is not None and q.ndim == 4:
        read_share = min(k.shape[1], q.shape[1] - 1 + inputs.window) / max(1, k.shape[1])
    optional_inputs = ("sinks", "q_scale", "k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_k")
    read_bytes = nbytes(q, *(vars(inputs).get(field) for field in optional_inputs)) + nbytes(k, inputs.v) * read_share
    lse_bytes = 4 * math.prod(q.shape[:-1]) if inputs.return_lse else 0
    return Traffic(read_bytes, max(2, q.element_size()) * q.numel() + lse_bytes)


def unseen(q: torch.Tensor, return_lse: bool) -> AttentionResult:
    """Returns the result for queries `[..., D]` that see no key: zeros, and with `return_lse` a log-sum-exp of -inf."""
    out = torch.zeros_like(q)
    return (out, torch.full(q.shape[:-1], -math.inf, device=q.device)) if return_lse else out


def nothing_seen(of: Arguments) -> None:
    """Writes the result of a call without keys: zeros to its `out`, and its `sinks` (or else -inf) to its `lse`."""
    of.out.zero_()
    if of.lse is not None:
        of.lse.fill_(float("-inf")) if of.sinks is None else of.lse.copy_(of.sinks)


def strides_of(x: torch.Tensor | None, rank: int) -> tuple[int, ...]:
    """Returns the strides of the tensor `x`, or `rank` zeros if `x` is None."""
    return (0,) * rank if x is None else x.stride()


def get_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """Returns `softmax_scale`, or `head_dim**-0.5` if `softmax_scale` is None."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else float(softmax_scale)


SMALLEST_SCALE = 2.0**-100
"""The scale that replaces 0, because 0 would turn a masked score of -inf into NaN; every weight is still 1."""


def never_zero(softmax_scale: float | None) -> float | None:
    """Returns `softmax_scale`, or a tiny scale instead of 0: a masked score (-inf) times 0 would be NaN."""
    return SMALLEST_SCALE if softmax_scale == 0 else softmax_scale


def options(of: Arguments, keys: int) -> tuple[tuple[float, ...], tuple[int, ...], dict[str, Any]]:
    """Returns the arguments of a Triton attention kernel: numbers, strides and constants.

    The numbers are `(window, scale, factor, cap)` for `lib.attention.weigh`. `factor` multiplies a score before an
    exponential with base 2, and is positive. The constant `NEGATED` says whether the scale is negative. `cap` is the
    soft cap or 0. `keys` is the length of the longest sequence."""
    D, scale, has_softcap = of.q.shape[-1], get_scale(of.q, of.softmax_scale), of.softcap is not None
    has_window = of.window is not None and of.window < keys  # a wider window hides nothing
    score_factor = LOG2E * (1.0 if has_softcap else max(abs(scale), SMALLEST_SCALE))
    constexpr_args = {
        "CAUSAL": of.causal,
        "WINDOW": has_window,
        "CAP": has_softcap,
        "NEGATED": scale < 0 and not has_softcap,
        "HEAD_DIM": D,
        "BLOCK_D": max(padded(D), 16),
        **of.config.launch_arguments,
    }
    strides = *of.out.stride()[:-1], *strides_of(of.lse, of.q.ndim - 1), *strides_of(of.sinks, 1)
    return (of.window if has_window else 0, scale, score_factor, float(of.softcap or 0.0)), strides, constexpr_args

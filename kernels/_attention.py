"""What all attention launchers share: checks of options, outputs, the softmax scale, and the soft cap on the GPU."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rooflab.kernels._checks import output
from rooflab.reference.rules import check_dtype, check_shape

Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The result of attention: the output, or with `return_lse` the output and the log-sum-exp (LSE)."""
LOG2E = math.log2(math.e)
LN2 = math.log(2)


def outputs(
    out: Returned | None, shape: tuple[int, ...], q: torch.Tensor, return_lse: bool, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output of `shape`, and with `return_lse` the log-sum-exp of `shape[:-1]` in fp32: from `out`, or new tensors.

    dtype: the output's dtype; None means the dtype of q.  Raises `ValueError` where `out` does not fit.
    """
    if not return_lse:
        if isinstance(out, tuple):
            raise ValueError(f"out: expected one tensor without return_lse, got a tuple of {len(out)}")
        return output(out, shape, q, dtype), None
    if out is None:
        return output(None, shape, q, dtype), torch.empty(shape[:-1], dtype=torch.float32, device=q.device)
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError("out: expected a tuple of the output and the log-sum-exp with return_lse")
    check_shape("out[1]", out[1], *shape[:-1])
    check_dtype("out[1]", out[1], torch.float32)
    if out[1].device != q.device:
        raise ValueError(f"out[1]: expected a tensor on {q.device}, got {out[1].device}")
    return output(out[0], shape, q, dtype), out[1]


def get_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """`softmax_scale`, or head_dim**-0.5 if that is None."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else float(softmax_scale)


SMALLEST_SCALE = 2.0**-100
"""Replaces a scale of 0, with which a masked score of -inf would become NaN; every weight is still 1."""


def never_zero(softmax_scale: float | None) -> float | None:
    """`softmax_scale` for torch, which multiplies a mask's -inf by it."""
    return SMALLEST_SCALE if softmax_scale == 0 else softmax_scale


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores / cap) with the hardware's exponential; the error is at most 4 * 2**-24 of the cap."""
    return cap * (1 - 2 / (1 + tl.exp2(scores * (2.8853900817779268 / cap))))  # 2 log2(e)

"""What the launchers of every attention op share: guards of options, outputs, the scale, and the device's soft cap."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rooflab.kernels._checks import check_dtype, check_shape, output

Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""What attention returns: its output, or with the log-sum-exp if that is asked for."""
LOG2E = math.log2(math.e)
LN2 = math.log(2)


def check_options(
    q: torch.Tensor, causal: bool, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    """Raises `ValueError` on a window that is not causal or below 1, a soft cap that is not positive, sinks not (H,)
    fp32; q: (..., H, D)."""
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window: expected at least 1, and causal=True, got {window} and causal={causal}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected more than 0, got {softcap}")
    if sinks is not None:
        check_shape("sinks", sinks, q.shape[-2])
        check_dtype("sinks", sinks, torch.float32)
        if sinks.device != q.device:
            raise ValueError(f"sinks: expected a tensor on {q.device}, got {sinks.device}")


def outputs(
    out: Returned | None,
    shape: tuple[int, ...],
    q: torch.Tensor,
    return_lse: bool,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output of `shape` and, if asked for, the log-sum-exp (shape[:-1]) fp32: the given ones, or new.

    dtype: the output's; None is that of q.
    Raises `ValueError` on an `out` that is not what will be returned.
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
    """`softmax_scale`, or head_dim**-0.5 for None."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else float(softmax_scale)


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores / cap), by the hardware's exponential: good to 4 units of 2**-24 of the cap."""
    return cap * (1 - 2 / (1 + tl.exp2(scores * (2.8853900817779268 / cap))))  # 2 log2(e)

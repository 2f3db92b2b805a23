"""Implements the kernel `naive`: one torch step after another.  The scores are in fp32 in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels._attention import get_scale
from rooflab.kernels.launcher import kernel


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes attention of q `[B, T, H, D]`, k and v `[B, S, H_kv, D]` to `out`.  Writes its log-sum-exp `[B, T, H]` to
    `lse`.
    """
    T, S = q.shape[1], k.shape[1]
    group_size = q.shape[2] // k.shape[2]
    queries = _scaled(q, q_scale)
    keys, values = (_scaled(*x).repeat_interleave(group_size, dim=1) for x in ((k, k_scale), (v, v_scale)))
    scores = queries @ keys.mT * scale  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        last_keys = torch.arange(T, device=q.device)[:, None] + S - T
        key_indices = torch.arange(S, device=q.device)
        hidden_mask = key_indices > last_keys
        if window is not None:
            hidden_mask |= key_indices <= last_keys - window
        scores.masked_fill_(hidden_mask, -math.inf)
    log_denominator = torch.logsumexp(scores, dim=-1)  # (B, H, T)
    if sinks is not None:
        log_denominator = torch.logaddexp(log_denominator, sinks[:, None])
    # The denominator of a row that sees no key is -inf, and -inf - -inf would be NaN.
    weights = torch.exp(scores - log_denominator.masked_fill(log_denominator == -math.inf, 0.0)[..., None])
    out.copy_((weights @ values).transpose(1, 2))
    if lse is not None:
        lse.copy_(log_denominator.transpose(1, 2))


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Converts `x` `[B, T, H, D]` to fp32 `[B, H, T, D]`, and multiplies it by the scale of each head, `[B, H]`."""
    x_fp32 = x.transpose(1, 2).float()
    return x_fp32 if scale is None else x_fp32 * scale[:, :, None, None]


@kernel(backend="torch")
def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    return_lse: bool,
) -> None:
    """Computes attention step by step.  First multiplies q, k and v by their scales.  Each step writes to memory."""
    score_scale = get_scale(q, softmax_scale)
    attend(q, k, v, out, lse, causal, score_scale, window, softcap, sinks, q_scale, k_scale, v_scale)

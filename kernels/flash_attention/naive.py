"""Attention as its formula reads: expanded heads, materialised fp32 scores, softmax, second product."""

from __future__ import annotations

import math

import torch

from rooflab.kernels._attention import Returned, check_options, get_scale, outputs
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.registry import register
from rooflab.roofline.model import Traffic


def traffic(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Traffic:
    """Every step's operands from and to HBM: the (B, H, T, S) fp32 matrix crosses it seven times, more with options."""
    B, T, H, _ = q.shape
    S, group, size = k.shape[1], H // k.shape[2], q.element_size()
    scores = 4 * B * H * T * S
    narrow = q.dtype != torch.float32
    casts = (q.numel() + 2 * k.numel()) if narrow else 0  # of q, k and v, and the output's way back
    expanded = 4 * 2 * k.numel() * group
    passes = 4 + causal + 3 * (softcap is not None) + 2 * (sinks is not None)
    # In order: casts, heads expanded, q k^T, scale, cap, mask, log-sum-exp, weights, p v, output.
    read = casts * size + 4 * 2 * k.numel() + expanded + passes * scores + 4 * 2 * q.numel()
    write = 4 * casts + expanded + (passes - 1) * scores + (4 + size) * q.numel() + 4 * return_lse * B * T * H
    return Traffic(read, write, launches=10 + 3 * narrow + 6 * causal + 3 * (softcap is not None))


@register(op="flash_attention", name="naive", role="naive", backend="torch", traffic=traffic)
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    out: Returned | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Returned:
    """softmax(q k^T * scale) v with the scores in memory.  q: (B, T, H, D); k, v: (B, S, H_kv, D); (B, T, H, D).

    Raises `ValueError` on shapes, dtypes or options that do not fit.
    """
    check_args(q, k, v)
    check_options(q, causal, window, softcap, sinks)
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    T, S = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    queries = q.transpose(1, 2).float()
    keys, values = (x.transpose(1, 2).float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = queries @ keys.mT * get_scale(q, softmax_scale)  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        last = torch.arange(T, device=q.device)[:, None] + S - T
        key = torch.arange(S, device=q.device)
        unseen = key > last
        if window is not None:
            unseen |= key <= last - window
        scores.masked_fill_(unseen, -math.inf)
    denominator = torch.logsumexp(scores, dim=-1)  # (B, H, T)
    if sinks is not None:
        denominator = torch.logaddexp(denominator, sinks[:, None])
    # A row that sees no key has -inf there, and -inf - -inf would be NaN.
    weights = torch.exp(scores - denominator.masked_fill(denominator == -math.inf, 0.0)[..., None])
    out.copy_((weights @ values).transpose(1, 2))
    if lse is None:
        return out
    return out, lse.copy_(denominator.transpose(1, 2))

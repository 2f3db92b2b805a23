"""Attention as its formula reads: expanded heads, materialised fp32 scores, softmax, second product."""

from __future__ import annotations

import math

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.flash_attention._args import check_args, get_scale
from rooflab.kernels.registry import register
from rooflab.roofline.model import Traffic


def traffic(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> Traffic:
    """Every step's operands from and to HBM: the (B, H, T, S) fp32 matrix crosses it six times, eight if causal."""
    B, T, H, _ = q.shape
    S, group, size = k.shape[1], H // k.shape[2], q.element_size()
    scores = 4 * B * H * T * S
    narrow = q.dtype != torch.float32
    casts = (q.numel() + 2 * k.numel()) if narrow else 0  # of q, k and v, and the output's way back
    expanded = 4 * 2 * k.numel() * group
    # In order: casts, heads expanded, q k^T, scale, mask, softmax, p v, output.
    read = casts * size + 4 * 2 * k.numel() + expanded + (3 + causal) * scores + 4 * 2 * q.numel()
    write = 4 * casts + expanded + (3 + causal) * scores + (4 + size) * q.numel()
    return Traffic(read, write, launches=7 + 3 * narrow + 6 * causal)


@register(op="flash_attention", name="naive", role="naive", backend="torch", traffic=traffic)
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v with the scores in memory.  q: (B, T, H, D); k, v: (B, S, H_kv, D); (B, T, H, D).

    Raises `ValueError` on shapes or dtypes that do not fit.
    """
    check_args(q, k, v)
    out = output(out, tuple(q.shape), q)
    T, S = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    queries = q.transpose(1, 2).float()
    keys, values = (x.transpose(1, 2).float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = queries @ keys.mT * get_scale(q, softmax_scale)  # (B, H, T, S)
    if causal:
        last = torch.arange(T, device=q.device)[:, None] + S - T
        scores.masked_fill_(torch.arange(S, device=q.device) > last, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    if causal and T > S:
        weights.nan_to_num_(nan=0.0)  # the first T - S queries see no key
    return out.copy_((weights @ values).transpose(1, 2))

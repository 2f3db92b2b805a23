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
    """Every step's operands from and to HBM: the (B, H, T, S) fp32 matrix crosses it eight times, ten if causal."""
    B, T, H, D = q.shape
    S, group = k.shape[1], H // k.shape[2]
    scores = 4 * B * H * T * S
    dense_q, dense_kv = 4 * q.numel(), 4 * 2 * k.numel()
    size = q.element_size()
    # Casts to fp32, heads expanded, q k^T, scale, mask, softmax, empty rows, p v, cast of the output.
    read = q.numel() * size + 2 * k.numel() * size + dense_kv + dense_q + dense_kv * group + (4 + causal) * scores
    write = dense_q + dense_kv + dense_kv * group + (4 + causal) * scores + dense_q + q.numel() * size
    return Traffic(read + dense_q, write, launches=11 + 2 * causal)


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
        scores = scores.masked_fill(torch.arange(S, device=q.device) > last, -math.inf)
    weights = torch.softmax(scores, dim=-1).nan_to_num(nan=0.0) if S < T and causal else torch.softmax(scores, dim=-1)
    return out.copy_((weights @ values).transpose(1, 2))

"""Attention written as its formula: expanded heads, fp32 scores in memory, softmax, second product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels._attention import get_scale
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every torch call reads its operands from HBM and writes its result to HBM: the (B, H, T, S) fp32 matrix is read 8
    times and written 6 times, plus once for a mask and three times for a cap.  `logsumexp` alone is four kernels that
    read it.  In fp8 each scale is a pass over its operand in fp32.
    """
    q, k, causal = inputs.q, inputs.k, inputs.causal
    B, T, H, _ = q.shape
    S, group, size = k.shape[1], H // k.shape[2], q.element_size()
    result = max(size, 2)  # the result of fp8 is bf16
    scales = (q, inputs.q_scale), (k, inputs.k_scale), (inputs.v, inputs.v_scale)
    given = [(x, scale) for x, scale in scales if scale is not None]
    scaled = sum(4 * x.numel() for x, _ in given)
    rows = 4 * B * H * T
    narrow = q.dtype != torch.float32
    casts = (q.numel() + 2 * k.numel()) if narrow else 0  # of q, k and v; the output's cast is below
    expanded = 4 * 2 * k.numel() * group
    capped, windowed, sinking = inputs.softcap is not None, inputs.window is not None, inputs.sinks is not None
    more = causal + 3 * capped
    mask = T * S * (causal + 2 * windowed)  # one byte each; the window's mask is combined with the diagonal's
    # In this order: casts, scales, expanded heads, the scores, one number per row around logsumexp, the two products.
    small = sinking + inputs.return_lse
    read = casts * size + scaled + 4 * 2 * k.numel() + expanded + (8 + more) * rows * S + (10 + small) * rows + mask
    read += 4 * 2 * q.numel()
    write = 4 * casts + scaled + expanded + (6 + more) * rows * S + (7 + small) * rows + mask
    write += (4 + result) * q.numel()
    launches = 19 + 3 * narrow + len(given) + 6 * causal + 3 * windowed + 3 * capped + small
    read += sum(nbytes(scale) for _, scale in given)
    return Traffic(read, write, launches=launches)


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, causal: bool, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None,
    q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes the result of q (B, T, H, D), k and v (B, S, H_kv, D) into out, and the log-sum-exp (B, T, H) into lse."""
    T, S = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    queries = _scaled(q, q_scale)
    keys, values = (_scaled(*x).repeat_interleave(group, dim=1) for x in ((k, k_scale), (v, v_scale)))
    scores = queries @ keys.mT * scale  # (B, H, T, S)
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
    # The denominator of a row that sees no key is -inf, and -inf - -inf would be NaN.
    weights = torch.exp(scores - denominator.masked_fill(denominator == -math.inf, 0.0)[..., None])
    out.copy_((weights @ values).transpose(1, 2))
    if lse is not None:
        lse.copy_(denominator.transpose(1, 2))


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """x (B, T, H, D) as (B, H, T, D) fp32, times its heads' scales (B, H)."""
    x32 = x.transpose(1, 2).float()
    return x32 if scale is None else x32 * scale[:, :, None, None]


@kernel(backend="torch", traffic=traffic)
def naive(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, return_lse: bool,
) -> None:  # fmt: skip
    """Scales multiply the heads first; then every step of the formula has its result in memory."""
    scale = get_scale(q, softmax_scale)
    attend(q, k, v, out, lse, causal, scale, window, softcap, sinks, q_scale, k_scale, v_scale)

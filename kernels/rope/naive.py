"""Rotary embedding as a model's source code writes it: gather the angles, then rotate q and k, one call per step."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Two gathers; then per tensor a cast, four products, a difference, a sum, and two strided copies."""
    positions = inputs.positions
    angles = 4 * len(positions) * inputs.cos.shape[1]
    moves: list[tuple[float, float]] = [(8 * len(positions) + angles, angles)] * 2
    for x in (inputs.q, inputs.k):
        half, narrow = 4 * x.numel() // 2, x.element_size() * x.numel() // 2
        if x.dtype != torch.float32:
            moves.append((2 * narrow, 2 * half))
        moves += [(half + angles, half)] * 4 + [(2 * half, half)] * 2 + [(half, narrow)] * 2
    return steps(*moves)


@kernel(backend="torch", traffic=traffic)
def naive(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    *,
    interleaved: bool,
) -> None:
    """In fp32, step by step; a position outside the tables raises torch's error."""
    D = q.shape[2]
    firsts = slice(0, D, 2) if interleaved else slice(0, D // 2)
    seconds = slice(1, D, 2) if interleaved else slice(D // 2, D)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # (T, 1, D/2)
    for x, result in ((q, q_out), (k, k_out)):
        x32 = x.float()
        x1, x2 = x32[..., firsts], x32[..., seconds]
        turned = x1 * c - x2 * s, x2 * c + x1 * s  # both before a store: the result may be x itself
        result[..., firsts], result[..., seconds] = turned

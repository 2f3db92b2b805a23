"""The definition in torch steps: sort each row, cut by rank, cumulative mass and ratio, then race."""

from __future__ import annotations

import math

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.sample._args import check_args
from rooflab.kernels.sample._philox import first_word, log_exponential
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each step's (B, V) operands: radix passes over fp32 keys and int64 indices, masses, and the race's int64 words,
    most of them in Philox's ten rounds."""
    logits = inputs.logits
    n = logits.numel()
    sort = 4 * 2 * (4 + 8)  # four 8-bit passes over keys and indices, each way
    filters = 60
    race = 10 * 12 * 8
    return Traffic(n * (logits.element_size() + sort + filters + 2 * race), n * (sort + filters + race), launches=180)


@register(op="sample", name="naive", role="naive", backend="torch", traffic=traffic)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids (B,) int64 by sorting every row; settings are (B,) tensors; a row with temperature 0 is greedy.

    Raises `ValueError` on wrong shapes or dtypes, and on the CPU on settings out of range.
    """
    check_args(logits, temperature, top_k, top_p, min_p, seed, position)
    B, V = logits.shape
    out = output(out, (B,), logits, torch.int64)
    ordered, order = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    rank = torch.arange(V, device=logits.device)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    # The maximum is subtracted before the division, so the error of a probability is relative to the gap to the best.
    scores = (ordered - ordered[:, :1]) / divisor
    kept = (rank < torch.where(top_k > 0, top_k, V)[:, None]) & (ordered > -math.inf)
    mass = torch.where(kept, scores.exp(), 0.0).double()
    before = mass.cumsum(-1) - mass
    kept &= (before < top_p.double()[:, None] * mass.sum(-1, keepdim=True)) | (top_p >= 1)[:, None]
    kept &= mass >= min_p.double()[:, None]
    words = first_word(seed[:, None], position[:, None], rank[None])
    race = torch.full_like(scores, -math.inf).scatter_(1, order, scores.masked_fill(~kept, -math.inf))
    drawn = (race - log_exponential(words)).argmax(-1)  # in vocabulary order: ties go to the lowest index
    return out.copy_(torch.where(temperature > 0, drawn, order[:, 0]))

"""The definition in torch steps: sort each row, cut by rank, cumulative mass and ratio, then race."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.philox import log_exponential, words_of_rows
from rooflab.kernels.sample._args import Edit, check_rows, edited, note_logprobs
from rooflab.kernels.sample._args import traffic as read_once
from rooflab.reference.sample_rules import Edits
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each step's (B, V) operands: radix passes over fp32 keys and int64 indices, masses, and the race's int64 words,
    most of them in Philox's ten rounds, of which one serves four tokens."""
    logits = inputs.logits
    n = logits.numel()
    sort = 4 * 2 * (4 + 8)  # four 8-bit passes over keys and indices, each way
    filters = 60
    race = 10 * 12 * 8 // 4
    least = read_once(inputs)
    return Traffic(
        least.read_bytes + n * (sort + filters + 2 * race),
        least.write_bytes + n * (sort + filters + race),
        launches=180,
    )


@kernel(backend="torch", traffic=traffic)
def naive(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor,
    tokens: Tensor, logprob_ids: Tensor | None, logprobs: Tensor | None, *,
    top_n: int | None, **edits: Edit,
) -> None:  # fmt: skip
    """Sorts every row; on the CPU raises `ValueError` on rows without a law."""
    V = logits.shape[1]
    ordered, order = torch.sort(edited(logits, Edits(**edits)), dim=-1, descending=True, stable=True)
    check_rows(ordered[:, 0])
    kept, scores = kept_of(ordered, temperature, top_k, top_p, min_p)
    race = torch.full_like(scores, -math.inf).scatter_(1, order, scores.masked_fill(~kept, -math.inf))
    # In vocabulary order: ties go to the lowest index.
    drawn = (race - log_exponential(words_of_rows(seed, position, V))).argmax(-1)
    tokens.copy_(torch.where(temperature > 0, drawn, order[:, 0]))
    note_logprobs(logits, tokens, logprob_ids, logprobs)


def kept_of(
    ordered: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For rows (B, V) in descending order: which tokens may be drawn, and (x - largest x) / temperature."""
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    # The maximum is subtracted before the division, so the error of a probability is relative to the gap to the best.
    scores = (ordered - ordered[:, :1]) / divisor
    kept = (rank < torch.where(top_k > 0, top_k, len(rank))[:, None]) & (ordered > -math.inf)
    mass = torch.where(kept, scores.exp(), 0.0).double()
    before = mass.cumsum(-1) - mass
    kept &= (before < top_p.double()[:, None] * mass.sum(-1, keepdim=True)) | (top_p >= 1)[:, None]
    kept &= mass >= min_p.double()[:, None]
    return kept, scores

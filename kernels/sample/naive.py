"""The kernel `naive` sorts each row, applies top-k, top-p and min-p, and draws with Philox numbers, by torch calls."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.philox import log_exponential, words_of_rows
from rooflab.kernels.sample._args import EditTensor, check_rows, edited, note_logprobs
from rooflab.reference.sample_rules import Edits


@kernel(backend="torch")
def naive(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    tokens: Tensor,
    logprob_ids: Tensor | None,
    logprobs: Tensor | None,
    *,
    top_n: int | None,
    **edits: EditTensor,
) -> None:
    """Draws tokens after a sort of every row.  On a CPU, raises `ValueError` on a row without a finite maximum."""
    V = logits.shape[1]
    sorted_logits, sorted_ids = torch.sort(edited(logits, Edits(**edits)), dim=-1, descending=True, stable=True)
    check_rows(sorted_logits[:, 0])
    in_support, scores = support_of(sorted_logits, temperature, top_k, top_p, min_p)
    id_scores = torch.full_like(scores, -math.inf).scatter_(1, sorted_ids, scores.masked_fill(~in_support, -math.inf))
    # In vocabulary order: ties go to the lowest index.
    token_ids = (id_scores - log_exponential(words_of_rows(seed, position, V))).argmax(-1)
    tokens.copy_(torch.where(temperature > 0, token_ids, sorted_ids[:, 0]))
    note_logprobs(logits, tokens, logprob_ids, logprobs)


def support_of(
    ordered: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mask of tokens to draw from, and `(x - max) / temperature`.  `ordered`: the logits x, descending."""
    token_rank = torch.arange(ordered.shape[1], device=ordered.device)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    # The maximum is subtracted before the division, so the error of a probability is relative to the gap to the best.
    scores = (ordered - ordered[:, :1]) / divisor
    in_support = (token_rank < torch.where(top_k > 0, top_k, len(token_rank))[:, None]) & (ordered > -math.inf)
    token_mass = torch.where(in_support, scores.exp(), 0.0).double()
    mass_before = token_mass.cumsum(-1) - token_mass
    in_support &= (mass_before < top_p.double()[:, None] * token_mass.sum(-1, keepdim=True)) | (top_p >= 1)[:, None]
    in_support &= token_mass >= min_p.double()[:, None]
    return in_support, scores

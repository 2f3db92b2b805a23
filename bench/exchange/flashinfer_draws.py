"""Comparing draws with draws: two samplers that need not agree on a token must agree on how often they give it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy import stats

from rooflab.reference.compare import ErrorStats
from rooflab.reference.distribution import FALSE_ALARM, smallest_effect

ROWS = 2
"""Distributions of a workload that are compared."""
DRAWS, LEAST_DRAWS = 2048, 64
"""Draws of each, fewer where the vocabulary is large."""
ELEMENTS = 2**22
POOLED = 10
"""Draws of both together that a cell has at least, so that 5 of each are expected."""
CELLS = 32


def repeated(given: Mapping[str, torch.Tensor | float]) -> dict[str, torch.Tensor | float]:
    """A sampling workload's first rows, each as often as it is to be drawn from, one after the other."""
    probs = given["probs"]
    assert isinstance(probs, torch.Tensor), "a sampling definition has a tensor of probabilities"
    rows = min(ROWS, len(probs))
    draws = max(LEAST_DRAWS, min(DRAWS, ELEMENTS // max(1, rows * probs.shape[1])))
    return {
        name: value[:rows].repeat_interleave(draws, dim=0) if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in given.items()
    }


def same_law(name: str, ours: torch.Tensor, theirs: torch.Tensor, probs: torch.Tensor) -> ErrorStats:
    """Whether two sets of draws (N,) look drawn from one law per distinct row of `probs` (N, V), all together.

    Tokens of neighbouring rank by probability are pooled to cells; the statistic of a row is Pearson's for two equal
    samples, sum (a - b)^2 / (a + b), and those of the rows are added.  A right pair fails once in 1 / `FALSE_ALARM`.
    `note` says the least departure, as Cohen's w, that would have been found with probability 0.99.
    """
    if ours.shape != theirs.shape:
        note = f"expected shape {tuple(theirs.shape)}, got {tuple(ours.shape)}"
        return ErrorStats(name, False, float("nan"), float("inf"), ours.numel(), theirs.numel(), note=note)
    ours, theirs, probs = (value.cpu() for value in (ours, theirs, probs))
    if ours.numel() and not 0 <= int(ours.min()) <= int(ours.max()) < probs.shape[1]:
        return ErrorStats(name, False, float("nan"), float("inf"), 1, ours.numel(), note="a token out of range")
    statistic, freedom, moved = 0.0, 0, 0.0
    starts = [0, *(1 + torch.nonzero((probs[1:] != probs[:-1]).any(dim=1)).flatten()).tolist(), len(probs)]
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        first, second = (_counts(tokens[begin:end], probs[begin]) for tokens in (ours, theirs))
        cells = _pooled(first, second, max(POOLED, 2 * (end - begin) // CELLS))
        statistic += sum((a - b) ** 2 / (a + b) for a, b in cells)
        freedom += len(cells) - 1
        moved = max(moved, sum(abs(a - b) for a, b in cells) / (2 * (end - begin)))
    if freedom < 1:  # one token alone is possible: then it is the same one
        wrong = int((ours != theirs).sum())
        return ErrorStats(name, wrong == 0, float(wrong), float(wrong), wrong, ours.numel())
    critical = float(stats.chi2.isf(FALSE_ALARM, freedom))
    draws = len(probs) // max(1, len(starts) - 1)
    # Two samples of n draws tell as much as one of n / 2 against a law that is known.
    effect = smallest_effect(draws // 2, freedom)
    note = f"total variation {moved:.2g} over {freedom} degrees of freedom; a departure of w >= {effect:.2g} is seen"
    return ErrorStats(name, statistic <= critical, moved, statistic / critical, 0, ours.numel(), note=note)


def _counts(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """How often each token was drawn, the most probable first, (V,)."""
    counts = torch.bincount(tokens.long(), minlength=len(probs))
    return counts[torch.argsort(probs, descending=True, stable=True)]


def _pooled(ours: torch.Tensor, theirs: torch.Tensor, least: int) -> list[tuple[int, int]]:
    """Neighbours joined to cells of at least `least` draws of both; the last takes what is left."""
    cells: list[tuple[int, int]] = []
    a = b = 0
    drawn = torch.nonzero(ours + theirs).flatten()
    for more_a, more_b in zip(ours[drawn].tolist(), theirs[drawn].tolist(), strict=True):
        a, b = a + more_a, b + more_b
        if a + b >= least:
            cells.append((a, b))
            a = b = 0
    if a + b and cells:
        last = cells.pop()
        a, b = a + last[0], b + last[1]
    return [*cells, (a, b)] if a + b else cells

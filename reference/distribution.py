"""Tests whether a sampler draws from the right distribution, with Pearson's chi-square test and the test's power."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FALSE_ALARM = 1e-6
"""The probability that the test rejects a correct sampler."""


@dataclass(frozen=True)
class ChiSquare:
    """The result of a chi-square test, and the smallest effect that this test can detect."""

    passed: bool
    p_value: float
    smallest_effect: float
    """Cohen's w, sqrt(sum (q - p)^2 / p): the test detects a law q at this distance from p with probability 0.99."""
    outside: int
    """The number of draws of tokens whose probability is 0; one such draw fails the test."""


def chi_square(tokens: torch.Tensor, law: torch.Tensor) -> ChiSquare:
    """Tests whether `tokens` (N,) int64 are draws from the probabilities `law` (V,), which sum to 1.

    Tokens with fewer than 5 expected draws are pooled into one cell (Cochran's rule). A correct sampler fails once in 1
    / `FALSE_ALARM` runs. Raises `ValueError` if fewer than two cells have 5 expected draws."""
    from scipy import stats  # this import takes 0.6 s

    law = law.double().cpu()
    draws = tokens.numel()
    observed = torch.bincount(tokens.cpu(), minlength=len(law)).double()
    outside = int(observed[law == 0].sum())
    expected = law * draws
    rare = (expected < 5) & (law > 0)
    common = expected >= 5
    cells = [(observed[common], expected[common])]
    if bool(rare.any()):
        cells.append((observed[rare].sum()[None], expected[rare].sum()[None]))
    observed, expected = (torch.cat([cell[i] for cell in cells]) for i in range(2))
    freedom = len(expected) - 1
    if freedom < 1:
        raise ValueError(f"law: expected at least two cells of 5 expected draws, got {freedom + 1} from {draws} draws")
    statistic = float(((observed - expected) ** 2 / expected).sum())
    p_value = float(stats.chi2.sf(statistic, freedom))
    return ChiSquare(p_value >= FALSE_ALARM and outside == 0, p_value, smallest_effect(draws, freedom), outside)


def smallest_effect(draws: int, freedom: int, power: float = 0.99) -> float:
    """Returns the smallest Cohen's w that is detected with probability `power`. The noncentrality is draws * w**2."""
    from scipy import stats

    critical = stats.chi2.isf(FALSE_ALARM, freedom)
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        if stats.ncx2.sf(critical, freedom, draws * middle**2) < power:
            low = middle
        else:
            high = middle
    return high

"""Tests whether a sampler draws from the right distribution, with Pearson's chi-square test and the test's power."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_P_VALUE = 1e-6
"""The probability that the test rejects a correct sampler."""


@dataclass(frozen=True)
class ChiSquare:
    """Holds the result of a chi-square test, and the smallest effect that the test can detect."""

    passed: bool
    p_value: float
    smallest_effect: float
    """Cohen's w, sqrt(sum (q - p)^2 / p): the test detects a law q at this distance from p with probability 0.99."""
    outside: int
    """The number of draws of tokens whose probability is 0; one such draw fails the test."""


def chi_square(tokens: torch.Tensor, law: torch.Tensor) -> ChiSquare:
    """Tests whether `tokens` (N,) int64 are draws from the probabilities `law` (V,), which sum to 1.

    Tokens with fewer than 5 expected draws are counted together (Cochran's rule). A correct sampler fails with
    probability `MIN_P_VALUE`. Raises `ValueError` if there are too few draws for the test."""
    from scipy import stats  # this import takes 0.6 s

    law = law.double().cpu()
    draws = tokens.numel()
    observed_counts = torch.bincount(tokens.cpu(), minlength=len(law)).double()
    outside_draws = int(observed_counts[law == 0].sum())
    expected_counts = law * draws
    rare_mask = (expected_counts < 5) & (law > 0)
    common_mask = expected_counts >= 5
    cell_pairs = [(observed_counts[common_mask], expected_counts[common_mask])]
    if bool(rare_mask.any()):
        cell_pairs.append((observed_counts[rare_mask].sum()[None], expected_counts[rare_mask].sum()[None]))
    observed_counts, expected_counts = (torch.cat([cell_pair[i] for cell_pair in cell_pairs]) for i in range(2))
    dof = len(expected_counts) - 1
    if dof < 1:
        raise ValueError(f"law: expected at least two cells of 5 expected draws, got {dof + 1} from {draws} draws")
    chi2_value = float(((observed_counts - expected_counts) ** 2 / expected_counts).sum())
    p_value = float(stats.chi2.sf(chi2_value, dof))
    return ChiSquare(p_value >= MIN_P_VALUE and outside_draws == 0, p_value, smallest_effect(draws, dof), outside_draws)


def smallest_effect(draws: int, freedom: int, power: float = 0.99) -> float:
    """Returns the smallest Cohen's w (effect size) that the test detects with probability `power`."""
    from scipy import stats

    critical_value = stats.chi2.isf(MIN_P_VALUE, freedom)
    lower_effect, upper_effect = 0.0, 10.0
    for _ in range(60):
        middle_effect = (lower_effect + upper_effect) / 2
        if stats.ncx2.sf(critical_value, freedom, draws * middle_effect**2) < power:
            lower_effect = middle_effect
        else:
            upper_effect = middle_effect
    return upper_effect

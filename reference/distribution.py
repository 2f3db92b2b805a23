"""Does a sampler draw from the law it should?  Pearson's chi-square with the power stated beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FALSE_ALARM = 1e-6
"""Chance that a correct sampler is called wrong."""


@dataclass(frozen=True)
class ChiSquare:
    """What the test found, and what it could have found."""

    passed: bool
    p_value: float
    smallest_effect: float
    """Cohen's w, sqrt(sum (q - p)^2 / p), of the least departure q from the law p found with probability 0.99."""
    outside: int
    """Draws of tokens whose probability is 0; one is enough to fail."""


def chi_square(tokens: torch.Tensor, law: torch.Tensor) -> ChiSquare:
    """Whether `tokens` (N,) int64 look drawn from `law` (V,), whose values sum to 1.

    Tokens expected fewer than 5 times are pooled (Cochran's rule). A correct sampler fails once in 1 / `FALSE_ALARM`
    runs. Raises `ValueError` where the law leaves nothing to test.
    """
    from scipy import stats  # 0.6 s of every command

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
    seen, wanted = (torch.cat([cell[i] for cell in cells]) for i in range(2))
    freedom = len(wanted) - 1
    if freedom < 1:
        raise ValueError(f"law: expected at least two cells of 5 expected draws, got {freedom + 1} from {draws} draws")
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    p_value = float(stats.chi2.sf(statistic, freedom))
    return ChiSquare(p_value >= FALSE_ALARM and outside == 0, p_value, smallest_effect(draws, freedom), outside)


def smallest_effect(draws: int, freedom: int, power: float = 0.99) -> float:
    """The w at which the noncentral chi-square of noncentrality draws * w**2 is found with probability `power`."""
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

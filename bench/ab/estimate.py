"""Computes statistics of paired measurements: an estimate, its bounds, and the smallest effect that could be detected.

An effect is `log(time_B / time_A)`, from two fresh processes, one per side.  Launches of a process are not independent.
With 1% of noise between processes, a test on single launches finds a slowdown in 40% of pairs of identical code.

The estimate is the median of the means of all pairs of effects (Hodges and Lehmann, 1963).  The bounds and the p-values
come from the exact distribution of Wilcoxon's signed-rank test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

ALPHA = 0.05
"""The one-sided level of every bound."""
POWER_FACTOR = 1.0 + 0.8416 / 1.6449
"""If an effect exceeds the margin by this many half-widths of a 95% bound, it is found with a probability of 80%."""


@dataclass(frozen=True)
class Effect:
    """Describes the effect of side B over side A with its bounds, as log ratios."""

    pairs: int
    effect: float
    """The Hodges-Lehmann estimate."""
    low: float
    """The one-sided 95% lower bound; minus infinity with fewer than five pairs, which have no bound."""
    high: float
    """The one-sided 95% upper bound; infinity with fewer than five pairs."""

    @property
    def half_width(self) -> float:
        """Returns the larger of the two distances from the estimate to its bounds."""
        return max(self.effect - self.low, self.high - self.effect)

    def smallest_visible(self, margin: float) -> float:
        """Returns the smallest effect that these pairs detect as larger than `margin` with a probability of 80%."""
        return margin + POWER_FACTOR * self.half_width

    def pairs_for(self, effect: float) -> float:
        """Returns how many pairs of measurements are needed to detect `effect` with a probability of 80%.  `effect` is
        a log ratio of times.  Returns infinity if the present pairs are too few to bound the effect."""
        num_pairs = self.pairs * (POWER_FACTOR * self.half_width / effect) ** 2
        return max(5.0, math.ceil(num_pairs)) if math.isfinite(num_pairs) else math.inf


def estimate(effects: Sequence[float]) -> Effect:
    """Estimates the effect from one or more pairs."""
    pair_averages = walsh_averages(effects)
    num_skipped = _skipped(len(effects))
    low = float(pair_averages[num_skipped - 1]) if num_skipped else -math.inf
    high = float(pair_averages[-num_skipped]) if num_skipped else math.inf
    return Effect(len(effects), float(np.median(pair_averages)), low, high)


def p_above(effects: Sequence[float], margin: float = 0.0) -> float:
    """Returns the p-value of the hypothesis `effect <= margin`.  A Walsh average equal to `margin` supports it."""
    num_above = int((walsh_averages(effects) > margin).sum())
    return float(_distribution(len(effects))[num_above:].sum())


def walsh_averages(effects: Sequence[float]) -> np.ndarray:
    """Returns the means of all pairs of effects, in ascending order.  A pair may hold the same effect twice."""
    effect_array = np.asarray(effects, dtype=float)
    first_indices, second_indices = np.triu_indices(effect_array.size)
    pair_averages: np.ndarray = np.sort((effect_array[first_indices] + effect_array[second_indices]) / 2)
    return pair_averages


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Returns the smallest false-discovery rate at which each p-value is significant (Benjamini and Hochberg, 1995)."""
    from scipy.stats import false_discovery_control  # The import takes 0.6 s, which no measuring process should spend.

    return [float(p_value) for p_value in false_discovery_control(p_values)] if p_values else []


@cache
def _distribution(pairs: int) -> np.ndarray:
    """Returns the null distribution of the signed-rank sum: each rank from 1 to `pairs` counts with probability 1/2."""
    probabilities = np.ones(1)
    for rank in range(1, pairs + 1):
        probabilities = np.convolve(probabilities, [0.5, *[0.0] * (rank - 1), 0.5])
    return probabilities


@cache
def _skipped(pairs: int) -> int:
    """Returns the rank of the lower confidence bound in the sorted Walsh averages.  A Walsh average is the mean of two
    measured effects.  The smallest average has rank 1.

    `pairs` is the number of effects.  `ALPHA` is the bound's error probability.  Returns 0 for too few effects."""
    return int(np.searchsorted(np.cumsum(_distribution(pairs)), ALPHA, side="right"))

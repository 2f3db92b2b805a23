"""The statistics of an A/B, on simulated processes and against scipy."""

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from rooflab.bench.ab.estimate import adjusted, estimate, p_above
from rooflab.bench.ab.evidence import drift
from rooflab.bench.ab.verdict import BEYOND_DRIFT, Evidence, Rules, judge, wants_confirmation

RULES = Rules()
BASE_S = 1e-3


def simulated(generator, pairs, slower=0.0, between=0.01, drift=0.0):
    """Medians of fresh processes: each has its own level, and a pair shares the machine's drift."""
    common = generator.normal(0, drift, pairs) if drift else np.zeros(pairs)
    a = BASE_S * np.exp(common + generator.normal(0, between, pairs))
    b = BASE_S * (1 + slower) * np.exp(common + generator.normal(0, between, pairs))
    return tuple(zip(a.tolist(), b.tolist(), strict=True))


def compared(generator, key="k", pairs=10, **how):
    """The evidence of one run, with its confirmation where the first batch calls for one."""
    first = Evidence(key, first=simulated(generator, pairs, **how))
    if not wants_confirmation(first, RULES):
        return first
    return Evidence(key, first=first.first, second=simulated(generator, pairs, **how))


def rate(verdict, trials=150, seed=0, **how):
    generator = np.random.default_rng(seed)
    found = [judge([compared(generator, **how)], RULES)[0].verdict for _ in range(trials)]
    return found.count(verdict) / trials


@pytest.mark.parametrize("pairs", (1, 5, 6, 11))
@pytest.mark.parametrize("margin", (-0.01, 0.0, 0.02))
def test_p_value_is_the_exact_signed_rank_test(pairs, margin):
    from scipy.stats import wilcoxon

    effects = np.random.default_rng(pairs).normal(0.01, 0.01, pairs)
    wanted = wilcoxon(effects - margin, alternative="greater", method="exact").pvalue
    assert p_above(list(effects), margin) == pytest.approx(wanted, rel=1e-12)


def test_bounds_are_the_test_inverted():
    effects = list(np.random.default_rng(3).normal(0.03, 0.01, 12))
    found = estimate(effects)
    assert p_above(effects, found.low - 1e-9) <= 0.05 < p_above(effects, found.low + 1e-9)
    flipped = estimate([-effect for effect in effects])
    assert (flipped.low, flipped.high, flipped.effect) == pytest.approx((-found.high, -found.low, -found.effect))


def test_fewer_than_five_pairs_bound_nothing():
    assert estimate([0.1] * 4).low == -math.inf and estimate([0.1] * 5).low == pytest.approx(0.1)


def test_false_discovery_control_is_over_all_p_values():
    # Benjamini and Hochberg: the k-th least of m, times m / k, made monotone from the end.
    assert adjusted([0.01, 0.02, 0.9, 0.04]) == pytest.approx([0.04, 0.04, 0.9, 0.04 * 4 / 3])
    assert adjusted([]) == []


# P(SLOWER) of the published simulation (10 and 20 pairs, one-sided 95% lower bound above the threshold of 2%).
def test_power_is_the_published_one():
    for pairs, between, slower, published in (
        (10, 0.005, 0.03, 0.99),
        (10, 0.01, 0.03, 0.60),
        (10, 0.01, 0.04, 0.99),
        (10, 0.01, 0.05, 1.0),
        (10, 0.02, 0.05, 0.90),
        (20, 0.01, 0.03, 0.90),
        (20, 0.02, 0.05, 1.0),
    ):
        # Three standard errors of 150 trials.
        tolerance = 3 * math.sqrt(max(published * (1 - published), 0.01) / 150) + 0.005
        assert rate("SLOWER", pairs=pairs, between=between, slower=slower) > published - tolerance


def test_identical_code_is_not_called_slower_or_faster():
    for between in (0.0, 0.005, 0.01, 0.02):
        # The published rule: 0 at every noise; pooled launches are called slower in 2% to 46% of such runs.
        assert rate("SLOWER", between=between) == 0 == rate("FASTER", between=between)


@pytest.mark.parametrize("apart", [0, 1, 10, 100, 1000])
def test_a_machine_that_wanders_does_not_go_beyond_its_drift(apart):
    """Twelve runs of identical code a side, a minute each, and `apart` times as long between the sides."""
    generator = np.random.default_rng(apart)
    minutes = [*range(12), *range(12 + 12 * apart, 24 + 12 * apart)]
    stamps = [(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=at)).isoformat() for at in minutes]
    for _ in range(200):
        steps = generator.normal(0, 0.01 * np.sqrt(np.diff(minutes, prepend=0)))
        runs = [*zip(stamps, (BASE_S * np.exp(np.cumsum(steps))).tolist(), strict=True)]
        effect = math.log(np.median([s for _, s in runs[12:]]) / np.median([s for _, s in runs[:12]]))
        assert abs(effect) < 0.6 * BEYOND_DRIFT * drift(runs[:12], runs[12:])

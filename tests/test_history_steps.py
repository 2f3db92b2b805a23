"""Step detection: exact, quiet on noise, and able to see a 5% step."""

import itertools
import math

import numpy as np
import pytest

from rooflab.bench.report.trends.steps import LEAST_NOISE, costs, find_steps, noise, partition, penalty

SERIES = 200
FIVE_PERCENT = math.log(1.05)


def draw(kind, rng, count):
    """Noise of standard deviation about one."""
    if kind == "laplace":
        return rng.laplace(0, math.sqrt(0.5), count)
    if kind == "student":
        return rng.standard_t(3, count) / 1.2
    values = rng.normal(0, 1, count)
    if kind == "spikes":
        values[rng.random(count) < 0.1] += 8
    if kind == "correlated":
        for i in range(1, count):
            values[i] += 0.4 * values[i - 1]
    return values


def cost_of(values, starts):
    edges = [0, *starts, len(values)]
    return sum(np.abs(values[a:b] - np.median(values[a:b])).sum() for a, b in itertools.pairwise(edges))


def test_costs_are_the_distances_to_each_piece_s_median():
    values = np.random.default_rng(0).normal(size=9).round(1)  # rounded, so that there are ties
    table = costs(values.tolist())
    for start, end in itertools.combinations(range(10), 2):
        assert table[start, end] == pytest.approx(cost_of(values[start:end], []))


@pytest.mark.parametrize("price", [0.5, 2.0, 6.0])
def test_the_partition_is_the_cheapest_of_all(price):
    rng = np.random.default_rng(1)
    for _ in range(20):
        values = rng.normal(size=9) + np.repeat(rng.normal(0, 4, 3), 3)
        every = [
            starts
            for count in range(4)
            for starts in itertools.combinations(range(2, 8), count)
            if all(b - a >= 2 for a, b in itertools.pairwise([0, *starts, 9]))
        ]
        cheapest = min(cost_of(values, starts) + price * len(starts) for starts in every)
        found = partition(values.tolist(), price)
        assert cost_of(values, found) + price * len(found) == pytest.approx(cheapest)
        assert all(b - a >= 2 for a, b in itertools.pairwise([0, *found, 9]))


@pytest.mark.parametrize(
    ("kind", "most"), [("normal", 0.01), ("laplace", 0.01), ("student", 0.01), ("spikes", 0.03), ("correlated", 0.1)]
)
def test_noise_alone_has_no_steps(kind, most):
    rng = np.random.default_rng(2)
    for count in (5, 12, 40):
        false = sum(bool(find_steps((draw(kind, rng, count) * 0.01).tolist())) for _ in range(SERIES))
        assert false <= most * SERIES, f"{false} of {SERIES} series of {count} points"


@pytest.mark.parametrize(
    ("sigma", "after", "least"), [(0.005, 2, 0.95), (0.01, 3, 0.7), (0.01, 5, 0.95), (0.02, 10, 0.55)]
)
def test_a_step_of_five_percent_is_found_where_it_is(sigma, after, least):
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(SERIES):
        values = sigma * draw("normal", rng, 12 + after)
        values[12:] += FIVE_PERCENT
        found += any(abs(start - 12) <= 1 for start in find_steps(values.tolist()))
    assert found >= least * SERIES


def test_one_slow_run_is_no_step_and_does_not_move_a_level():
    values = 0.005 * np.random.default_rng(4).normal(size=30)
    values[10] += 0.5
    assert find_steps(values.tolist()) == []


def test_two_steps_are_two():
    values = 0.005 * np.random.default_rng(5).normal(size=36)
    values[12:24] += FIVE_PERCENT
    values[24:] -= FIVE_PERCENT
    assert find_steps(values.tolist()) == [12, 24]


def test_few_points_and_equal_points_have_no_steps():
    for values in ([], [1.0], [1.0, 2.0, 3.0], [1.0] * 20):
        assert find_steps(values) == []
    assert noise([1.0, 1.0, 1.0]) == LEAST_NOISE
    assert find_steps([0.0] * 6 + [FIVE_PERCENT] * 6) == [6], "a clock's grid makes runs equal; the step is no less one"


def test_noise_is_its_standard_deviation_and_a_step_hardly_raises_it():
    values = np.random.default_rng(6).normal(0, 0.01, 400)
    assert noise(values.tolist()) == pytest.approx(0.01, rel=0.1)
    values[200:] += 0.1
    assert noise(values.tolist()) == pytest.approx(0.01, rel=0.15)


def test_a_step_costs_more_in_a_longer_series():
    assert penalty(100) > penalty(10) > 0


def test_values_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="^values: expected finite"):
        partition([1.0, math.nan, 1.0, 1.0], 1.0)

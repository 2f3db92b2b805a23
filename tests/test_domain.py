"""The domain of each op: what is drawn from it, what a cover meets, and how a failing case becomes small."""

import random
from itertools import combinations

import pytest

from rooflab.bench.check.drawn import ON_HARDWARE, drawn_points
from rooflab.kernels.registry import get_op, ops
from rooflab.reference.domain import Domain, Sizes, shrunk
from rooflab.reference.spec import Case

OPTIONS = Domain(
    {"a": (0, 1, 2), "b": (0, 1), "c": ("x", "y", "z"), "d": (False, True)},
    lambda **values: None if values["a"] == 2 and values["b"] == 1 else Case(**values),
)


def as_drawn(case):
    return case


def test_a_cover_meets_every_pair_that_may_be_combined_in_few_cases():
    points = list(OPTIONS.cover(3, as_drawn, 60))
    pairs = {pair for point in points for pair in combinations(point.values.items(), 2)}
    axes = OPTIONS.axes.items()
    wanted = {
        ((a, x), (b, y)) for (a, xs), (b, ys) in combinations(axes, 2) for x in xs for y in ys
        if (a, x, b, y) != ("a", 2, "b", 1)
    }  # fmt: skip
    assert pairs == wanted and len(points) < 20, "30 of the 36 combinations are allowed"
    assert [p.case for p in OPTIONS.cover(3, as_drawn, 60)] == [p.case for p in points]
    assert [p.case for p in OPTIONS.cover(4, as_drawn, 60)] != [p.case for p in points]


def test_sizes_lie_where_kernels_have_edges():
    domain = Domain({"n": Sizes(1, 70_000), "even": Sizes(2, 300, 2)}, Case)
    state = random.Random(0)
    drawn = [domain._draw(state)[0] for _ in range(3000)]
    sizes = {values["n"] for values in drawn}
    assert {1, 255, 256, 257, 2047, 2049, 65_535, 65_537} <= sizes and max(sizes) <= 70_000
    assert {values["even"] % 2 for values in drawn} == {0} and {2, 254, 258} <= {values["even"] for values in drawn}


def test_a_failing_case_becomes_as_small_as_it_still_fails():
    domain = Domain({"M": Sizes(1, 5000), "N": Sizes(1, 5000), "bias": (False, True), "layout": ("NT", "NN")}, Case)
    asked = []

    def fails(case):
        asked.append(case)
        return case["N"] > 256 and case["bias"]

    points = domain.cover(0, as_drawn, 60)
    start = next(point for point in points if fails(point.case) and point.case["M"] > 1 and point.case["N"] > 600)
    found = shrunk(domain, start, as_drawn, fails, 60)
    assert found.case == Case(M=1, N=257, bias=True, layout="NT")
    asked.clear()
    assert shrunk(domain, start, as_drawn, fails, 3).case != start.case and len(asked) == 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("op", ops())
def test_what_an_op_s_domain_draws_are_cases_of_the_op(op):
    spec = get_op(op)
    points = drawn_points(spec, 5, ON_HARDWARE)
    assert len(points) >= 15 and len({point.case for point in points}) == len(points)
    assert all(spec.check_case(point.case) == point.case for point in points)
    for key in (*spec.cases["smoke"][0], *spec.optional):
        assert len({point.case.get(key) for point in points}) > 1, f"{key} has more than one value"

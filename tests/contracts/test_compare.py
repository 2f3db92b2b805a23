"""The comparison under every verdict: NaN never passes, and infinities pass only where the oracle has them."""

import math

import pytest
import torch

from rooflab.reference import compare
from rooflab.reference.compare import elementwise, exact

NAN, INF = math.nan, math.inf


def verdict(actual, oracle, tolerance):
    as_tensor = [torch.tensor(values, dtype=torch.float64) for values in (actual, oracle, tolerance)]
    return elementwise("y", *as_tensor)


@pytest.mark.parametrize(
    ("actual", "oracle", "tolerance", "passed"),
    [
        ([1.0, 2.0], [1.0, 2.1], [0.0, 0.11], True),
        ([1.0, 2.0], [1.0, 2.1], [0.0, 0.09], False),
        ([2.0], [1.0], [0.9999], False),
        ([NAN], [1.0], [1e9], False),
        ([1.0], [NAN], [1e9], False),
        ([NAN], [NAN], [1e9], False),
        ([1.0], [1.5], [NAN], False),
        ([INF], [INF], [0.0], True),
        ([INF], [-INF], [1e9], False),
        ([INF], [1e300], [1e9], False),
        ([1.0], [INF], [INF], False),  # a tolerance that scales with the oracle allows nothing there
        ([-0.0], [0.0], [0.0], True),
        ([1.0], [math.nextafter(1.0, 2.0)], exact(torch.ones(1)).tolist(), False),  # of moved data
        ([], [], [], True),
    ],
)
def test_what_passes(actual, oracle, tolerance, passed):
    stats = verdict(actual, oracle, tolerance)
    assert stats.passed is passed
    assert (stats.max_error_over_tolerance <= 1) is passed, "the ratio says the same as the verdict"
    assert stats.mismatched == (0 if passed else 1)


def test_the_worst_element_is_named():
    stats = verdict([[0.0, 0.0], [0.5, 3.0]], [[0.0, 0.1], [0.0, 0.0]], [[1.0, 1.0], [0.1, 1.0]])
    assert (stats.worst_index, stats.mismatched, stats.total) == ((1, 0), 2, 4)
    assert stats.max_abs_error == 3.0 and stats.max_error_over_tolerance == pytest.approx(5)
    assert "2 of 4 elements off, worst at [1, 0]" in stats.describe()


def test_another_shape_never_passes():
    assert not elementwise("y", torch.zeros(2), torch.zeros(3), torch.zeros(3)).passed
    assert not elementwise("y", torch.zeros(3), torch.zeros(3, 1), torch.zeros(3, 1)).passed


def test_pieces_say_what_the_whole_says(monkeypatch):
    generator, found = torch.Generator().manual_seed(0), set()
    for limit in (1.0, 3.0):
        oracle = torch.randn(7, 9, generator=generator, dtype=torch.float64)
        actual = (oracle + torch.randn(7, 9, generator=generator)).float()
        for place, value in ((3, NAN), (20, INF), (62, -INF), (40, 1e30)) if limit == 1.0 else ():
            actual.view(-1)[place] = value
        for tolerance in (torch.full((7, 9), limit, dtype=torch.float64), torch.tensor(limit), torch.full((9,), limit)):
            monkeypatch.setattr(compare, "CHUNK_ELEMENTS", {"cpu": 10**6})
            whole = elementwise("y", actual.mT.contiguous().mT, oracle, tolerance)
            monkeypatch.setattr(compare, "CHUNK_ELEMENTS", {"cpu": 8})
            pieces = elementwise("y", actual, oracle, tolerance)
            assert repr(pieces) == repr(whole) and compare.all_within(actual, oracle, tolerance) == whole.passed
            found.add((whole.passed, math.isnan(whole.max_abs_error)))
    assert found == {(False, True), (True, False)}

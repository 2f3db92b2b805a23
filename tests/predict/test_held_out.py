"""The predictor beside published times of public kernels, and where the kernels would stand beside a library."""

from types import SimpleNamespace

import pandas as pd
import pytest
from held_out import MODELS, by_kernel, by_shape, fit
from standing import CANNOT_TELL, WOULD_MEET, WOULD_MISS, Expected
from targets.target import AcceptanceTarget

from rooflab.bench.predict import public
from rooflab.bench.predict.public import PublishedTime, unfitted
from rooflab.bench.suite.entries import EntryOutcome

CODE = MODELS["compiled code"]


def reading(kernel="a", shape=1, launch_us=0.0, factor=1.0):
    """A published time that is `factor` of the prediction, and `launch_us` for each of two launches."""
    rest = 10.0 * shape
    published = 2 * launch_us + factor * rest
    return PublishedTime(
        kernel, "memory", "h200", str(shape), "graph", published, 8.0 * shape, 2, 2.6, 9.0 * shape, 2.6 + rest
    )


def test_the_time_of_a_launch_and_a_factor_are_found():
    found = fit(CODE, pd.DataFrame([reading(shape=shape, launch_us=3.0, factor=1.5) for shape in (1, 3, 10, 30)]))
    assert (found.launch_us, found.factor) == (3.0, pytest.approx(1.5))
    without = fit(CODE, pd.DataFrame([reading(shape=shape, factor=1.5) for shape in (1, 3)]), launches=False)
    assert (without.launch_us, without.factor) == (0.0, pytest.approx(1.5))


def test_errors_are_of_shapes_and_kernels_that_the_fit_has_not_seen():
    even = [reading("a", shape, factor=1.0 if number % 2 else 2.0) for number, shape in enumerate((1, 2, 3, 4))]
    assert by_shape(CODE, pd.DataFrame(even), launches=False).median == pytest.approx(
        1.0
    )  # twice what the unseen shapes took
    ones = [reading("a", 1), reading("a", 2), reading("b", 1, factor=2.0), reading("b", 2, factor=2.0)]
    two = pd.DataFrame(ones)
    assert by_kernel(CODE, two, launches=False).median == pytest.approx(0.75)  # 1.0 of a, 0.5 of b
    assert by_kernel(CODE, two[:2]) is None
    assert unfitted(pd.DataFrame([reading(factor=0.5)] * 2)).median == pytest.approx(12.6 / 5 - 1)


@pytest.mark.parametrize(("ratio", "verdict"), [(2.0, WOULD_MEET), (1.0, CANNOT_TELL), (0.5, WOULD_MISS)])
def test_a_bar_is_told_only_if_both_ends_of_the_band_agree(ratio, verdict):
    bar = AcceptanceTarget("bar:gemm.any", "", EntryOutcome, {"geomean": 1.0, "cases": ["M=1"]}, 1.0, 1.0)
    found = Expected(bar, (SimpleNamespace(ratio=ratio),), (0.8, 1.6), public.Errors(0.1, 0.3))
    assert found.verdict == verdict
    assert found.row()["expected"] == f"{ratio / 1.6:.2f} to {ratio / 0.8:.2f}"

"""On which case a kernel meets the planted inputs before it is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_measure import CASE, CEILINGS, FP32, SPEC, Outcome, kernel, reading  # noqa: F401

from rooflab.bench.measure.measure import measure_op
from rooflab.reference.spec import Case


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("by_shape", [True, False])
@pytest.mark.parametrize(("least", "small"), [(0, CASE), (5, Case(T=6, H=8)), (7, None)])
def test_planted_inputs_are_met_on_the_first_small_case_that_the_kernel_takes(monkeypatch, least, small, by_shape):
    """A case that it refuses would answer for all others, and no GEMV would ever be timed."""
    checked = []

    def check(kernel, spec, case, scheme, device, seed, planted=True):
        checked.append((case, planted))
        return Outcome() if case["T"] >= least else Outcome("UNSUPPORTED", reason="too few rows")

    monkeypatch.setattr("rooflab.bench.check.check.check_kernel", check)
    spec = replace(SPEC, cases={"smoke": (CASE, Case(T=6, H=8))})
    few = "takes more rows"  # said by its shapes, or, as of an address that TMA cannot take, by the check alone
    rows = kernel(unsupported=lambda x, weight=None: few if by_shape and len(x) < least else None)
    cases = [Case(T=T, H=8) for T in (6, 8, 9)]
    found = list(measure_op(spec, [rows], cases, FP32, ceilings=CEILINGS, budget_s=1e-4))
    assert [record.status for record in found] == ["OK" if case["T"] >= least else "UNSUPPORTED" for case in cases]
    met = [case for case, planted in checked if planted and case["T"] >= least]
    assert met == [small or Case(T=8, H=8)], "once"

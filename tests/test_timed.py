"""What happens to a number when a kernel fails between its check and the end of its timing."""

from dataclasses import replace
from functools import partial

import torch
from test_measure import CASE, CEILINGS, FP32, SPEC, kernel, make_inputs, run

from rooflab.bench.measure import measure as module
from rooflab.bench.measure import timed
from rooflab.bench.measure.measure import measure_op
from rooflab.bench.timing.timing import Samples
from rooflab.reference.spec import Case


def test_a_kernel_that_goes_wrong_under_repeated_calls_publishes_no_number():
    """Right when it is called once, as a check calls it, and wrong when calls follow one another."""
    calls_made = []

    def tires(x, weight=None):
        calls_made.append(1)
        return x * weight if len(calls_made) < 6 else x * 0

    def forgets_out(x, weight=None, out=None):
        out = torch.empty_like(x) if out is None else out
        calls_made.append(1)
        return torch.mul(x, weight, out=out) if len(calls_made) < 6 else out.zero_()

    for fn in (tires, forgets_out):
        calls_made.clear()
        (record,) = run(kernel(fn=fn), budget_s=1e-4)
        assert record.status == "INCORRECT" and record.reason.startswith("after timing: y: 32 of 32")
        assert record.latency_median_ms is None


def test_a_kernel_that_breaks_off_while_timed_takes_no_other_with_it():
    calls_made = []

    def breaks(x, weight=None):
        calls_made.append(1)
        if len(calls_made) > 3:
            raise RuntimeError("launch failed")
        return x * weight

    broken, right = run(kernel("broken", fn=breaks), kernel("right"), budget_s=1e-4)
    assert broken.status == "RUNTIME_ERROR" and "while timed" in broken.reason and broken.latency_median_ms is None
    assert right.status == "OK" and right.latency_median_ms > 0


def test_the_rest_is_timed_together_again_where_one_broke_off(monkeypatch):
    asked, lonely = [], {}

    def read(functions, *, budget_s, **options):
        asked.append((sorted(functions), budget_s))
        if "bad" in functions or lonely.get(len(functions)):
            raise RuntimeError("launch failed")
        return {name: Samples((1.0,) * 3, "script", "cold") for name in functions}

    monkeypatch.setattr(timed, "time_functions", read)
    together = partial(timed.time_together, device=torch.device("cpu"), budget_s=1.0, seed=0, gpu_uuid=None)
    read_, failures, _ = together(dict.fromkeys(("a", "bad", "b"), print))
    assert asked == [(["a", "b", "bad"], 3.0), (["a"], 1.0), (["bad"], 1.0), (["b"], 1.0), (["a", "b"], 2.0)]
    assert list(failures) == ["bad"] and {samples.method for samples in read_.values()} == {"script"}
    asked.clear()
    assert list(together({"bad": print})[1]) == ["bad"] and len(asked) == 1, "it is known which"
    lonely[2] = True
    read_, failures, _ = together(dict.fromkeys(("a", "b"), print))
    assert not failures and {samples.method for samples in read_.values()} == {"script, timed alone"}


def test_planted_inputs_gate_what_is_timed(monkeypatch):
    """On the first small case that the kernel takes, whatever case is timed."""

    def planted(case, scheme, device, seed):
        for factor in (2.0, 3.0, 5.0):
            inputs = make_inputs(case, scheme, device, seed)
            yield f"times {factor}", inputs | {"x": inputs["x"] * factor}

    spec = replace(SPEC, planted=planted)
    large = Case(T=300, H=64)
    gated = []
    real = module._Run._gate

    def gate(self, kernel, case):
        gated.append(real(self, kernel, case))
        return gated[-1]

    monkeypatch.setattr(module._Run, "_gate", gate)
    list(measure_op(spec, [kernel()], [large, CASE], FP32, ceilings=CEILINGS, budget_s=1e-4))
    assert len(gated) == 2 and gated[0] is gated[1], "once a kernel"
    assert any("planted times 5.0" in label for label in gated[0].labels)

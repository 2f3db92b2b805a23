"""Measured kernels: the content of a record, the checks before a number, and kernels that fail during a measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooflab.bench.core import call as calls
from rooflab.bench.core import measure as module
from rooflab.bench.core import timed
from rooflab.bench.core.check import BROKEN_CONTEXT
from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.measure import Measurement
from rooflab.bench.core.noise import Samples
from rooflab.bench.core.running import ContextBroken
from rooflab.bench.core.settings import Settings
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import SCHEMES, Case, OpSpec, nbytes, randn
from rooflab.roofline.model import Ceilings, Cost, Traffic

FP32 = SCHEMES["fp32"]
CASE = Case(T=4, H=8)
CEILINGS = Ceilings("this", "measured", 1e9, {"fp32": 1e9}, 1e9)


def reference(x, weight=None):
    return x.double() * weight.double()


def make_inputs(case, scheme, device, seed):
    T, H = case["T"], case["H"]
    return {
        "x": randn(T, H, dtype=scheme.activation, device=device, seed=seed),
        "weight": randn(H, dtype=scheme.weight, device=device, seed=seed + 1),
    }


SPEC = OpSpec(
    name="scale",
    reference=reference,
    make_inputs=make_inputs,
    cost=lambda args: Cost(nbytes(args.x, args.weight), nbytes(args.x), {"fp32": 2.0 * args.x.numel()}),
    outputs=("y",),
    cases={"smoke": (CASE,)},
    tolerance=lambda inputs, outputs, scheme: tuple(2**-23 * output.abs() for output in outputs),
    prepared="weight",
)


def scale(x, weight=None):
    return x * weight


def kernel(name="naive", fn=scale, role="optimized", backend="torch", **options):
    return Kernel("scale", name, role, backend, fn, **options)


def outcome(status="OK", checked_by="torch", **more):
    errors = (ErrorStats("y", True, 0.0, 0.0, 0, 32),)
    return CheckResult("scale", "naive", "torch", CASE, "fp32", "cpu", 0, status, checked_by, errors, **more)


def passes(kernel, spec, case, scheme, device, seed):
    return outcome(checked_by="interpreter" if kernel.backend == "triton" else "torch")


QUICK = Settings(budget_s=1e-4)


def run(*kernels, check=passes, cases=(CASE,), spec=SPEC, **options):
    return list(measurement(kernels, check, spec, **options).records(kernels, cases))


def measurement(kernels, check=passes, spec=SPEC, **options):
    """A measurement whose kernels are checked by `check`; None: by the real checker."""
    made = Measurement(spec, FP32, **({"ceilings": CEILINGS, "settings": QUICK} | options))
    if check:
        made.planted_before = frozenset(each.name for each in kernels)
        made.check_here = lambda kernel, case: check(kernel, spec, case, FP32, made.device, made.settings.seed)
    return made


@pytest.fixture
def reading(monkeypatch):
    """Replaces the timer: every kernel takes what the returned list says."""
    seconds = [1.0]

    def time_functions(functions, device, **options):
        return {name: Samples((seconds[0],) * 3, "script", "cold", resolved=seconds[0] > 0) for name in functions}

    monkeypatch.setattr(timed, "time_functions", time_functions)
    return seconds


def test_a_record_holds_the_reading_its_work_and_its_bound(reading):
    traffic = Traffic(read_bytes=500.0, write_bytes=140.0)
    (record,) = run(kernel(traffic=lambda inputs: traffic), run_id="r", settings=replace(QUICK, seed=7))
    assert (record.status, record.basis, record.checked_by, record.device) == ("OK", "measured", "torch", "cpu")
    assert (record.op, record.kernel, record.case_id, record.case) == ("scale", "naive", "T=4,H=8", {"T": 4, "H": 8})
    assert (record.run_id, record.seed, record.scheme, record.timer) == ("r", 7, "fp32", "script")
    assert record.samples_s == [1.0] * 3 and record.latency_median_ms == 1000.0
    assert record.flops == 64.0 and record.least_bytes == 32 * 4 * 2 + 8 * 4
    assert (record.traffic_bytes, record.traffic_basis, record.bytes_per_s) == (640.0, "modelled", 640.0)
    assert record.intensity == pytest.approx(0.1) and record.flops_per_s == 64.0
    assert record.bound_ms == pytest.approx(288e-6) and record.limiter == "memory"
    assert record.bound_fraction == pytest.approx(288e-9)
    assert record.ceilings["kind"] == "measured" and record.environment["torch"] == torch.__version__
    assert record.commit == Environment.now().commit and record.clocks is None and record.activity_hash is None


def test_the_real_timer_and_the_real_checker_fit():
    kernels = [kernel(), kernel("zeros", fn=lambda x, weight=None: torch.zeros_like(x))]
    checked = run(*kernels, check=None)
    assert [record.status for record in checked] == ["OK", "INCORRECT"], [record.reason for record in checked]
    assert checked[0].latency_median_ms and checked[0].errors[0]["output"] == "y"
    assert checked[1].latency_median_ms is None and checked[1].errors[0]["mismatched"] == 32
    (record,) = run(kernel())
    assert record.sample_count >= 5 and len(record.samples_s) == record.sample_count
    assert 0 < record.latency_p20_ms <= record.latency_median_ms <= record.latency_p80_ms


def test_a_kernel_that_fails_its_check_publishes_no_number(reading):
    def check(kernel, *_):
        return passes(kernel, *_) if kernel.name == "right" else outcome("INCORRECT", reason="y: 3 of 32 elements off")

    wrong, right = run(kernel("wrong"), kernel("right"), check=check)
    assert (wrong.status, wrong.basis, wrong.reason) == ("INCORRECT", "bound", "y: 3 of 32 elements off")
    assert wrong.latency_median_ms is wrong.samples is wrong.flops_per_s is wrong.bound_fraction is None
    assert wrong.bound_ms == right.bound_ms and wrong.errors[0]["output"] == "y"
    assert right.status == "OK" and right.latency_median_ms == 1000.0


def test_what_cannot_run_here_says_why_and_keeps_its_bound(reading):
    def check(*_):
        raise AssertionError("not reached")

    on_gpu, absent = run(
        kernel("on_gpu", backend="cuda", devices=("cuda",)), kernel("absent", requires=("no_such_pkg",)), check=check
    )
    assert (on_gpu.status, on_gpu.reason) == ("UNSUPPORTED", "needs a CUDA device")
    assert (absent.status, absent.reason) == ("UNAVAILABLE", "no_such_pkg is not installed")
    for record in (on_gpu, absent):
        assert record.checked_by == "none" and record.basis == "bound" and record.latency_median_ms is None
        assert record.bound_ms > 0 and record.limiter == "memory" and record.intensity > 0


def test_weights_are_packed_and_outputs_allocated_outside_the_timed_calls():
    packed, outs, inputs = [], [], []

    def prepare(weight):
        packed.append(weight.data_ptr())
        return ("packed", weight)

    def fn(x, weight=None, out=None):
        label, weight = weight
        assert label == "packed"
        if out is None:
            return x * weight
        outs.append(out.data_ptr())
        inputs.append(x.data_ptr())
        return torch.mul(x, weight, out=out)

    (record,) = run(kernel(fn=fn, prepare=prepare))
    assert record.status == "OK" and len(outs) > record.sample_count
    assert len(packed) == len(set(packed)) == len(set(outs)) == len(set(inputs)) == calls.INPUT_COPIES
    assert outs[:3] == outs[3:6] and len(set(outs[:3])) == 3, "they take turns"


@pytest.mark.parametrize(("raised", "status"), [(4e9, "OK"), (1e9, "INVALID")])
def test_a_reading_above_the_roof_measures_the_roof_again_once(reading, monkeypatch, raised, status):
    reading[0] = 100e-9  # 288 bytes: 2.88 GB/s under a roof of 1
    asked = []

    def raise_ceilings(known, device):
        asked.append(known)
        return replace(known, hbm_bytes_per_s=raised)

    monkeypatch.setattr(module, "raise_ceilings", raise_ceilings)
    records = run(kernel(), kernel("other"))
    assert [record.status for record in records] == [status] * 2 and asked == [CEILINGS]
    for record in records:
        assert record.samples_s == [100e-9] * 3, "what was read is kept for whoever asks why"
        if status == "OK":
            assert record.bound_fraction == pytest.approx(0.72)
        else:
            assert record.reason.startswith("2.88 times the memory ceiling")


def test_inputs_that_do_not_fit_are_not_made(reading, monkeypatch):
    monkeypatch.setattr(calls, "free_bytes", lambda device: 1000.0)
    (record,) = run(kernel(), check=lambda *_: pytest.fail("checked without memory"))
    assert record.status == "OUT_OF_MEMORY" and "are free" in record.reason and record.bound_ms > 0


def test_a_dtype_without_a_matrix_rate_has_no_bound(reading):
    (record,) = run(kernel(), ceilings=replace(CEILINGS, tensor_flops_per_s={"bf16": 1e9}))
    assert record.status == "OK" and record.bound_ms is record.limiter is record.bound_fraction is None


def test_once_a_kernel_has_broken_the_context_nothing_runs_and_it_alone_is_blamed(reading, monkeypatch):
    told = []
    monkeypatch.setattr(module, "already_broken", lambda device: "illegal access" if told[-1] == ["scale/bad"] else "")
    kernels = [kernel(name) for name in ("first", "bad", "last")]
    cases = (CASE, CASE.but(T=2))
    bad = run(*kernels, cases=cases, running=lambda ids: told.append(list(ids)))
    assert told == [["scale/first"], ["scale/bad"], []], "nothing is timed, and nothing else is run"
    guilty = bad.pop(1)
    assert (guilty.status, guilty.reason) == ("RUNTIME_ERROR", "illegal access"), "right, and a fault all the same"
    assert {one.reason for one in bad} == {f"{BROKEN_CONTEXT}, by scale/bad: illegal access"} and len(bad) == 5
    assert all(one.status == "RUNTIME_ERROR" and one.latency_median_ms is None for one in bad)
    limited = measurement(kernels, settings=replace(QUICK, limit_s=60.0))
    limited.running, found = lambda ids: told.append(list(ids)), []
    with pytest.raises(ContextBroken, match="^the CUDA context was already broken, by scale/bad: illegal access$"):
        found.extend(limited.records(kernels, cases))
    assert [one.kernel for one in found] == ["bad"], "a fresh process does the rest, with what is not to blame"


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize(("least", "small"), [(0, CASE), (5, Case(T=6, H=8)), (7, None)])
def test_planted_inputs_are_met_once_on_the_first_small_case_that_the_kernel_takes(monkeypatch, least, small):
    """A case that it refuses would answer for all others, and no GEMV would ever be timed."""
    checked = []

    def check(kernel, spec, case, scheme, device, seed, planted=True):
        checked.append((case, planted))
        return outcome() if case["T"] >= least else outcome("UNSUPPORTED", reason="too few rows")

    monkeypatch.setattr("rooflab.bench.core.measure.check_kernel", check)
    spec = replace(SPEC, cases={"smoke": (CASE, Case(T=6, H=8))})
    rows = kernel(unsupported=lambda inputs: "takes more rows" if len(inputs.x) < least else None)
    found = run(rows, check=None, cases=[Case(T=T, H=8) for T in (6, 8, 9)], spec=spec)
    assert [record.status for record in found] == ["OK" if T >= least else "UNSUPPORTED" for T in (6, 8, 9)]
    met = [case for case, planted in checked if planted and case["T"] >= least]
    assert met == [small or Case(T=8, H=8)]


def test_a_time_beside_another_process_on_the_card_is_noise(reading, monkeypatch):
    together = module.time_together
    monkeypatch.setattr(module, "time_together", lambda *a, **o: (*together(*a, **o)[:2], {"other_processes": 2}))
    (record,) = run(kernel())
    assert (record.status, record.reason) == ("NOISY", "other processes were on the card: 2")
    assert record.latency_median_ms and record.bound_fraction is record.flops_per_s is record.bytes_per_s is None
    assert record.samples_s and record.bound_ms > 0


@pytest.mark.parametrize(
    ("late", "status", "said"),
    [(lambda: 0, "INCORRECT", "after timing: y: 32 of 32"), (lambda: 1 // 0, "RUNTIME_ERROR", "while timed: ")],
)
def test_a_kernel_that_fails_only_under_repeated_calls_publishes_no_number_and_costs_no_other(late, status, said):
    calls_made = []

    def tires(x, weight=None):
        calls_made.append(1)
        return x * weight * (1 if len(calls_made) < 6 else late())

    tired, right = run(kernel("tired", fn=tires), kernel("right"))
    assert tired.status == status and tired.reason.startswith(said) and tired.latency_median_ms is None, tired.reason
    assert right.status == "OK" and right.latency_median_ms > 0

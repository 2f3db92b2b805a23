"""From samples to a record: what can be true, what is published, what is INVALID, and why."""

import hashlib
import math
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from git_repository import git
from op_kernels import own_registry  # noqa: F401
from test_measure import CASE, CEILINGS, FP32, SPEC, kernel, passes, run

from rooflab.bench.ab.sides import Wanted, two_kernels
from rooflab.bench.core import environment, timed
from rooflab.bench.core import measure as module
from rooflab.bench.core.environment import Environment, git_state
from rooflab.bench.core.noise import CAUSES, Samples, above_limits, why_invalid
from rooflab.bench.core.record import Record
from rooflab.bench.core.settings import Settings
from rooflab.bench.core.timed import observe
from rooflab.bench.core.timers import Observed
from rooflab.bench.core.timers.card import held_card
from rooflab.bench.core.timers.cpu import profiled
from rooflab.kernels import registry
from rooflab.roofline.model import Ceilings, Cost

CARD = Ceilings("a card", "at_clock", 1e12, {"bf16": 1e15}, 1e13, sfu_ops_per_s=1e12, launch_floor_s=1e-6)
EVENTS = "cuda events, launch gaps hidden"


L2 = replace(CARD, l2_bytes_per_s=5e12, launch_floor_s=0.0)


def read(seconds, method=EVENTS, l2_state="cold", **options):
    return Samples((seconds,) * 3, method, l2_state, **options)


def judge(seconds, cost=None, limits=None, clocks=None, **options):
    return why_invalid(read(seconds, **options), cost, limits, clocks)


def test_a_plausible_reading_is_none():
    cost = Cost(1e9, 1e6, {"bf16": 1e12}, 1e9, 1e8)
    clocks = {"throttled": [], "throttle_names": ["software power cap"]}
    assert judge(2e-3, cost, CARD, launch_floor_s=3e-6, clocks=clocks) is None
    assert judge(1e-3 / 1.04, cost, CARD) is None, "a little above the roof is noise"


def test_above_a_rate_of_the_card_is_named_with_its_cause():
    for cost, part, times in [
        (Cost(3e9, 0), "memory", "3.00"),
        (Cost(0, 0, {"bf16": 2e12}), "tensor", "2.00"),
        (Cost(0, 0, vector_flops=4e10), "vector", "4.00"),
        (Cost(0, 0, sfu_ops=5e9), "sfu", "5.00"),
        (Cost(0, 0, launches=2000), "launch", "2.00"),
    ]:
        reason = judge(1e-3, cost, CARD)
        assert reason == f"{times} times the {part} ceiling; likely cause: {CAUSES[part]}"


def test_bytes_below_the_rate_of_l2_were_never_moved():
    cost = Cost(6e9, 6e9)
    assert judge(2e-3, cost, L2, l2_state="warm").startswith("1.20 times the L2 ceiling; likely cause: kernels were")
    assert judge(3e-3, cost, L2, l2_state="warm") is None, "L2 may have held all of it"
    assert judge(3e-3, cost, CARD, l2_state="warm") is None, "and without a rate of L2 nothing is known"


def test_a_cold_cache_holds_what_is_written_and_nothing_that_is_read():
    assert judge(1e-3, Cost(1e8, 1e12), CARD, l2_state="cold") is None
    assert "2.00 times the memory ceiling" in judge(1e-3, Cost(2e9, 0), CARD, l2_state="cold")


def test_a_dtype_without_a_rate_bounds_nothing_and_the_rest_still_does():
    assert judge(1e-3, Cost(1e6, 0, {"fp8_e4m3": 1e15}), CARD) is None
    assert "memory" in judge(1e-3, Cost(1e10, 0, {"fp8_e4m3": 1e15}), CARD)


def test_below_what_an_empty_kernel_takes_nothing_was_launched():
    reason = judge(1e-6, launch_floor_s=2.4e-6)
    assert reason.startswith("1.00 us is below the 2.40 us that an empty kernel takes by cuda events")
    assert "cached answer" in reason
    assert judge(2.35e-6, launch_floor_s=2.4e-6) is None and judge(1e-6) is None


def test_a_timer_of_zero_stands_still():
    for seconds in [0.0, -1e-6]:
        assert "likely cause: the clock stands still, or nothing was launched" in judge(seconds)
    assert "timer read" in why_invalid(Samples((1e-3, 1e-3, -1e-3), EVENTS, "cold"), None, None)


def test_the_part_furthest_above_is_the_one_reported():
    above = above_limits(read(1e-3), Cost(2e9, 0, {"bf16": 5e12}), CARD)
    assert above == ("tensor", pytest.approx(5.0))
    assert above_limits(read(1e-3), Cost(12e9, 0), L2)[0] == "memory"


GOOD = {"seconds": (1.0, 1.0, 1.0), "method": "cuda events, launch gaps hidden", "l2_state": "cold"}


@pytest.fixture
def samples(monkeypatch):
    """Replaces the timer: what it reads, and the clocks that were seen meanwhile."""
    found = {"samples": dict(GOOD), "clocks": None, "options": None}

    def time_together(ready, settings, renew):
        found["options"] = settings, renew
        return {name: Samples(**found["samples"]) for name in ready}, {}, found["clocks"]

    monkeypatch.setattr(module, "time_together", time_together)
    return found


def test_a_record_names_the_method_its_floor_and_what_a_call_held(samples):
    samples["samples"] |= {"launch_floor_s": 2e-6, "busy_s": 0.5, "calls_per_sample": 20}
    samples["samples"] |= {"first_call_s": 3.0}
    samples["clocks"] = {"throttled": [], "sm_clock_hz": 1.755e9}
    asked = Settings(budget_s=1e-4, timer="perf_counter", flush="write", locked_sm_clock_mhz=1755.0)
    (record,) = run(kernel(), settings=asked)
    assert samples["options"][0] == asked and samples["options"][1]
    assert record.status == "OK" and record.timer == "cuda events, launch gaps hidden"
    numbers = {"calls_per_sample": 20.0, "launch_floor_ms": 2e-3, "kernel_busy_ms": 500.0, "first_call_ms": 3000.0}
    assert record.metrics == numbers
    assert record.clocks == {"throttled": [], "sm_clock_hz": 1.755e9, "locked_sm_clock_mhz": 1755.0}
    assert record.peak_memory_bytes == 0.0 and record.device_kernels == () and record.activity_hash is None


@pytest.mark.parametrize(
    ("change", "clocks", "reason"),
    [
        ({"fault": "time.perf_counter was replaced"}, None, "time.perf_counter was replaced"),
        ({"fault": "kernels changed between samples: 2 of 8 ran without reduce"}, None, "without reduce"),
        ({"seconds": (0.0, 0.0, 0.0), "resolved": False}, None, "the clock stands still"),
        ({"seconds": (1.0, math.nan, 1.0)}, None, "readings are not finite numbers"),
        ({"launch_floor_s": 2.0}, None, "an empty kernel takes by cuda events"),
        ({}, {"throttled": ["power brake"]}, "the card was throttled (power brake)"),
        ({"resolved": False}, None, "UNRESOLVED: the cuda events"),
        ({"seconds": (1e-9,) * 3}, None, "times the memory ceiling; likely cause: a cache held the data"),
    ],
)
def test_what_cannot_be_true_is_invalid_with_its_cause(samples, monkeypatch, change, clocks, reason):
    samples["samples"] |= change
    samples["clocks"] = clocks
    monkeypatch.setattr(module, "raise_ceilings", lambda known, device: known)
    (record,) = run(kernel())
    assert record.status == "INVALID" and reason in record.reason, record.reason
    assert record.samples and Record.from_json(record.to_json()).status == "INVALID"


def test_a_timer_of_zero_and_samples_that_are_no_numbers_have_no_rates(samples):
    for seconds, latency in (((0.0,) * 3, 0.0), ((math.nan,) * 3, None)):
        samples["samples"] |= {"seconds": seconds}
        (record,) = run(kernel())
        assert record.latency_median_ms == latency and record.flops_per_s is record.bound_fraction is None


def test_peak_memory_is_read_by_the_real_timer_too():
    def spreads(x, weight=None):
        return (x + x).mul_(weight) - x * weight

    plain, spread = run(kernel(), kernel("spreads", fn=spreads))
    assert plain.peak_memory_bytes == 0.0, "the output alone"
    assert spread.peak_memory_bytes == 2 * 4 * 8 * 4, "two tensors of the output's size"


def test_a_call_that_breaks_off_while_it_is_observed_publishes_nothing(monkeypatch):
    def breaks(call, device):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(timed, "observed", breaks)
    (record,) = run(kernel())
    assert record.status == "RUNTIME_ERROR" and "after timing: RuntimeError: illegal" in record.reason
    assert record.latency_median_ms is None


def test_a_gpus_measured_ceilings_are_measured_again_once(samples, monkeypatch):
    again = []

    def measured_again(known, device):
        again.append((known.hbm_bytes_per_s, device.type))
        return replace(known, hbm_bytes_per_s=1e12)

    monkeypatch.setattr(module, "raise_ceilings", measured_again)
    monkeypatch.setattr(module.Environment, "now", lambda gpu: None)
    monkeypatch.setattr(module, "limits_for", lambda device, ceilings: ceilings)
    run_ = module.Measurement(SPEC, FP32, Settings(device="cuda"), check=passes, ceilings=CEILINGS)
    cost = SPEC.cost_of(SPEC.make_inputs(CASE, FP32, torch.device("cpu"), 0))
    fast = Samples(**(GOOD | {"seconds": (80e-9,) * 3}))  # 160 bytes read and 64 FLOP, under 1 GB/s and 1 GFLOP/s
    bare = Record(kind="bench", run_id="r", status="OK", environment={}, device="cuda")
    assert run_.with_time(bare, fast, cost, None, Observed()).status == "OK" and again == [(1e9, "cuda")]
    faster = Samples(**(GOOD | {"seconds": (8e-9,) * 3}))
    assert "tensor ceiling" in run_.with_time(bare, faster, cost, None, Observed()).reason and len(again) == 1


def test_what_another_profiler_hides_is_left_open():
    class Ready:
        first = staticmethod(lambda: None)

    with profiled():
        seen, failures = observe({"a": Ready()}, torch.device("cpu"))
    assert seen == {"a": Observed()} and failures == {}


@pytest.mark.usefixtures("own_registry")
def test_a_users_file_is_hashed_into_its_record(tmp_path, samples):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rooflab.kernels.registry import register\n"
        '@register(op="silu_and_mul", name="mine_hashed", role="optimized", backend="torch")\n'
        "def mine(x):\n    return x\n"
    )
    (twin := tmp_path / "twin.py").write_text(file.read_text().replace("mine_hashed", "mine_twin"))
    (mine,) = registry.load_file(file)
    (record,) = run(kernel(fn=mine.fn), check=passes)
    assert (record.commit, record.dirty) == (None, None), "no repository has the file"
    assert record.environment["kernel_file_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert record.environment["rooflab"] == version("rooflab")
    for own, arguments in ((True, ("init", "-q")), (True, ("add", ".")), (False, ("commit", "-qm", "a"))):
        git(tmp_path, *arguments)
        (tmp_path / "result.jsonl").write_text("")  # a run's own, in no commit
        environment.file_state.cache_clear()
        (record,) = run(kernel(fn=mine.fn), check=passes)
        commit = git(tmp_path, "rev-parse", "HEAD").strip() if not own else None
        assert (record.commit, record.dirty) == (commit, None if own else False)
    assert record.environment["commit"] != commit, "Rooflab's stays beside it"
    for changed in (file, tmp_path / "other.py"):
        before = changed.read_text() if changed.exists() else None
        changed.write_text((before or "") + "\n")
        git(tmp_path, "add", "-N", ".")
        environment.file_state.cache_clear()
        assert git_state(file) == (commit, True), "it, or a file beside it, changed"
        changed.write_text(before) if before is not None else git(tmp_path, "reset", "-q")
    (tmp_path / ".gitignore").write_text("ignored.py")
    (tmp_path / "ignored.py").write_text("")
    (tmp_path / "new.py").write_text("")
    assert git_state(tmp_path / "ignored.py") == (None, None), "as site-packages are"
    assert git_state(tmp_path / "new.py") == (commit, True)
    sides = two_kernels(Wanted(("silu_and_mul",), (str(twin), "library"), schemes=("fp32",)))
    assert sides.a.commit == commit != sides.b.commit, "of an A/B too"
    library = registry.get_kernel("silu_and_mul", "library")
    ours = Environment.now().record("bench", library, SPEC.cases["smoke"][0], "fp32", "r")
    assert ours.commit == ours.environment["commit"] and "rooflab" not in ours.environment


def test_bench_refuses_what_this_device_has_not_got():
    message = "timer: expected one of perf_counter on cpu, got cupti, which needs a CUDA device"
    with pytest.raises(ValueError, match=message):
        Settings(timer="cupti")
    with (
        pytest.raises(ValueError, match="lock-clocks: expected a CUDA device, got cpu"),
        held_card(torch.device("cpu"), None, True),
    ):
        pass

"""From samples to a record: possible times, published times, INVALID readings and their reasons."""

import hashlib
import math
from dataclasses import replace
from importlib.metadata import version

import pytest
from git_repository import git
from op_kernels import own_registry  # noqa: F401
from test_measure import SPEC, kernel, passes, run

from rooflab.bench.core import environment
from rooflab.bench.core import measure as module
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.noise import LIKELY_CAUSES, Samples, why_invalid
from rooflab.bench.core.record import Record
from rooflab.bench.core.settings import Settings
from rooflab.kernels import registry
from rooflab.roofline.model import Ceilings, Cost

CARD = Ceilings("a card", "at_clock", 1e12, {"bf16": 1e15}, 1e13, sfu_ops_per_s=1e12, launch_floor_s=1e-6)
EVENTS = "cuda events, launch gaps hidden"
CALM = {"throttled": [], "throttle_names": ["software power cap"]}
L2 = replace(CARD, l2_bytes_per_s=5e12, launch_floor_s=0.0)


def judge(seconds, cost=None, limits=None, clocks=None, l2_state="cold", **options):
    return why_invalid(Samples((seconds,) * 3, EVENTS, l2_state, **options), cost, limits, clocks)


def over(times, part):
    return f"{times:.2f} times the {part} ceiling; likely cause: {LIKELY_CAUSES[part]}"


EMPTY = "1.00 us is below the 2.40 us that an empty kernel takes by cuda events"


@pytest.mark.parametrize(
    ("seconds", "cost", "limits", "options", "said"),
    [
        (2e-3, Cost(1e9, 1e6, {"bf16": 1e12}, 1e9, 1e8), CARD, {"launch_floor_s": 3e-6, "clocks": CALM}, ""),
        (1e-3 / 1.04, Cost(1e9, 1e6), CARD, {}, ""),  # a little above the roof is noise
        (2e-3, Cost(6e9, 6e9), L2, {"l2_state": "warm"}, "1.20 times the L2 ceiling; likely cause: kernels were"),
        (3e-3, Cost(6e9, 6e9), L2, {"l2_state": "warm"}, ""),  # L2 may have held all of it
        (2e-3, Cost(6e9, 6e9), CARD, {"l2_state": "warm"}, ""),  # and without a rate of L2 nothing is known
        (1e-3, Cost(1e8, 1e12), CARD, {"l2_state": "cold"}, ""),  # a cold cache holds what is written
        (1e-3, Cost(2e9, 0), CARD, {"l2_state": "cold"}, "2.00 times the memory ceiling"),  # and nothing that is read
        (1e-6, None, None, {"launch_floor_s": 2.4e-6}, EMPTY),
        (2.35e-6, None, None, {"launch_floor_s": 2.4e-6}, ""),
        (1e-6, None, None, {}, ""),
        (1e-3, Cost(3e9, 0), CARD, {}, over(3, "memory")),
        (1e-3, Cost(0, 0, {"bf16": 2e12}), CARD, {}, over(2, "tensor")),
        (1e-3, Cost(0, 0, vector_flops=4e10), CARD, {}, over(4, "vector")),
        (1e-3, Cost(0, 0, sfu_ops=5e9), CARD, {}, over(5, "sfu")),
        (1e-3, Cost(0, 0, launches=2000), CARD, {}, over(2, "launch")),
        (1e-3, Cost(2e9, 0, {"bf16": 5e12}), CARD, {}, over(5, "tensor")),  # the part furthest above
        (1e-3, Cost(1e10, 0, {"fp8_e4m3": 1e15}), CARD, {}, over(10, "memory")),  # a dtype without a rate
    ],
)
def test_what_cannot_be_true_is_said_and_what_can_be_is_not(seconds, cost, limits, options, said):
    found = judge(seconds, cost, limits, **options) or ""
    assert found.startswith(said) and bool(found) == bool(said), found


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
    samples["samples"] |= {"launch_floor_s": 2e-6, "calls_per_sample": 20}
    samples["clocks"] = {"throttled": [], "sm_clock_hz": 1.755e9}
    asked = Settings(budget_s=1e-4, min_samples=7)
    (record,) = run(kernel(), settings=asked)
    assert samples["options"][0] == asked and samples["options"][1]
    assert record.status == "OK" and record.timer == "cuda events, launch gaps hidden"
    numbers = {"calls_per_sample": 20.0, "launch_floor_ms": 2e-3}
    assert record.metrics == numbers
    assert record.clocks == {"throttled": [], "sm_clock_hz": 1.755e9}
    assert record.peak_memory_bytes is None and record.device_kernels == () and record.activity_hash is None


@pytest.mark.parametrize(
    ("change", "clocks", "reason", "latency"),
    [
        ({"fault": "time.perf_counter was replaced"}, None, "time.perf_counter was replaced", 1e3),
        ({"seconds": (0.0, 0.0, 0.0), "resolved": False}, None, "the clock stands still", 0.0),
        ({"seconds": (1e-3, 1e-3, -1e-3)}, None, "the clock stands still", 1.0),
        ({"seconds": (1.0, math.nan, 1.0)}, None, "readings are not finite numbers", None),
        ({"launch_floor_s": 2.0}, None, "an empty kernel takes by cuda events", 1e3),
        ({}, {"throttled": ["power brake"]}, "the card was throttled (power brake)", 1e3),
        ({"resolved": False}, None, "UNRESOLVED: the cuda events", 1e3),
        ({"seconds": (1e-9,) * 3}, None, "times the memory ceiling; likely cause: a cache held the data", 1e-6),
    ],
)
def test_what_cannot_be_true_is_invalid_with_its_cause(samples, monkeypatch, change, clocks, reason, latency):
    samples["samples"] |= change
    samples["clocks"] = clocks
    monkeypatch.setattr(module, "raise_ceilings", lambda known, device: known)
    (record,) = run(kernel())
    assert record.status == "INVALID" and reason in record.reason, record.reason
    assert record.latency_median_ms == (latency and pytest.approx(latency))
    assert latency or record.flops_per_s is record.bound_fraction is None
    assert record.samples and Record.from_json(record.to_json()).status == "INVALID"


@pytest.mark.usefixtures("own_registry")
def test_a_users_file_is_hashed_into_its_record_beside_the_commit_of_its_repository(tmp_path, samples):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rooflab.kernels.registry import register\n"
        '@register(op="silu_and_mul", name="mine_hashed", role="optimized", backend="torch")\n'
        "def mine(x):\n    return x\n"
    )
    (mine,) = registry.load_file(file)
    (record,) = run(kernel(fn=mine.fn), check=passes)
    assert (record.commit, record.dirty) == (None, None), "no repository has the file"
    assert record.environment["kernel_file_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert record.environment["rooflab"] == version("rooflab")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "a")):
        git(tmp_path, *arguments)
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    for changed in (False, True):
        environment.file_state.cache_clear()
        (record,) = run(kernel(fn=mine.fn), check=passes)
        assert (record.commit, record.dirty) == (commit, changed)
        file.write_text(file.read_text() + "\n")
    assert record.environment["commit"] != commit, "Rooflab's stays beside it"
    library = registry.get_kernel("silu_and_mul", "library")
    ours = Environment.now().record("bench", library, SPEC.cases["smoke"][0], "fp32", "r")
    assert ours.commit == ours.environment["commit"] and "rooflab" not in ours.environment

"""One A/B from begin to end, with fake processes that only answer: what is judged, left out, kept and judged again."""

import importlib
from dataclasses import dataclass, field, replace

import pytest

from rooflab.bench.ab import modes, pairs, self_test
from rooflab.bench.ab.ab_run import run, save
from rooflab.bench.ab.evidence import compare_files
from rooflab.bench.ab.pairs import AbSettings
from rooflab.bench.ab.sides import Comparison, Side, Subset, Target
from rooflab.bench.ab.verdict import Rules, exit_status
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import read
from rooflab.bench.report.trends.points import why_not

ENVIRONMENT = {"machine_key": "unit-test-machine", "cpu": "none", "cores": 2, "threads": 2, "gpu": None}
MS = 1e-3


@dataclass
class Fake:
    """What the processes of a test answer, by side and kernel; a check is a status and a reason."""

    seconds: dict = field(default_factory=dict)
    checks: dict = field(default_factory=dict)
    more: dict = field(default_factory=dict)
    """Other fields of records."""
    minute: int = 0

    def __call__(self, comparison, settings, judged):
        self.comparison, self.judged, self.environments = comparison, judged, {"A": ENVIRONMENT, "B": ENVIRONMENT}
        return self

    def _name(self, side, key):
        return side, self.comparison.side(side).targets[key].kernel

    def check(self, side, keys):
        answers = {key: self.checks.get(self._name(side, key), ("OK", "")) for key in keys}
        return {key: self._record(side, key, status=status, reason=why) for key, (status, why) in answers.items()}

    def _record(self, side, key, **values):
        return replace(self.comparison.side(side).targets[key].record("cpu", 0), **values)

    def measure(self, side, keys):
        self.minute += 1
        wobble = 1 + 0.001 * (-1) ** (self.minute // 2)
        found = {}
        for key in keys:
            values = timed_in(self.seconds.get(self._name(side, key), MS) * wobble)
            values["timestamp"] = f"2026-01-01T{self.minute // 60:02}:{self.minute % 60:02}:00+00:00"
            found[key] = self._record(side, key, **values | self.more.get(self._name(side, key), {}))
        return found


def timed_in(seconds):
    samples = {"samples": Record.packed([seconds] * 3), "sample_count": 3, "latency_median_ms": seconds * 1e3}
    return samples | {"basis": "measured", "timer": "cpu perf_counter", "l2_state": "cold"}


@pytest.fixture
def fake(monkeypatch):
    """The processes of the runs of a test."""
    processes = Fake()
    monkeypatch.setattr(importlib.import_module("rooflab.bench.ab.ab_run"), "JobRunner", processes)
    return processes


def target(name):
    return Target("rmsnorm", name, "T=4,H=32,eps=1e-06", "fp32")


def compared(*names, gone=(), **how):
    targets = {name: target(name) for name in names}
    left = {name: target for name, target in targets.items() if name not in gone}
    side = Side("base", targets, commit="a" * 40, dirty=False)
    other = Side("head", left, commit="b" * 40, dirty=False)
    return run(Comparison(side, other), AbSettings(), floors={}, **how)


def verdicts(result):
    return {outcome.key: (outcome.verdict, outcome.reason) for outcome in result.outcomes}


def test_a_pair_with_a_noisy_reading_is_not_counted(fake, tmp_path):
    """Neither now nor from the records; a comparison of such pairs alone is INVALID."""
    few = {"status": "NOISY", "reason": "it has 5 samples, and its time has room for 55", "latency_median_ms": None}
    fake.more["B", "all"] = few
    measure = fake.measure

    def sometimes(side, keys):
        found = measure(side, keys)
        if 9 <= fake.minute <= 11 and "some" in keys:
            found["some"] = replace(found["some"], **few)
        return found

    fake.measure = sometimes
    result = compared("all", "some")
    judged = {outcome.key: (outcome.verdict, outcome.pairs) for outcome in result.outcomes}
    assert judged == {"all": ("INVALID", 0), "some": ("UNRESOLVED", 10)}, "12 pairs, and two of them are not counted"
    assert result.stopped == f"14 pairs not counted, because a reading is NOISY: {few['reason']}"
    paths = save(result, tmp_path)
    again = {outcome.key.split()[0]: (outcome.verdict, outcome.pairs) for outcome in compare_files(*paths[1:], Rules())}
    assert again == {f"rmsnorm/{name}": verdict for name, verdict in judged.items()}


def test_a_check_without_an_answer_is_none_that_passed(monkeypatch):
    monkeypatch.setattr(pairs, "ask_process", lambda side, job, limit_s: iter(()))
    side = Side("head", {"one": target("one")})
    found = pairs.JobRunner(Comparison(side, side)).check("B", ["one"])["one"]
    assert (found.status, found.reason) == ("RUNTIME_ERROR", "its process gave no answer about it")


def test_what_neither_side_can_run_is_left_out_with_its_reason(fake):
    refused = "UNSUPPORTED", "rmsnorm/fp4 takes no H=32"
    fake.checks |= {("A", "fp4"): refused, ("B", "fp4"): refused, ("A", "mine"): refused}
    result = compared("fp4", "mine", "fine")
    assert {key: verdict for key, (verdict, _) in verdicts(result).items()} == {"mine": "FAILED", "fine": "SAME"}
    assert result.left_out == {"fp4": "rmsnorm/fp4 takes no H=32"}
    # Of two kernels one alone may have no time here; none of them has failed.
    sides = Side("fp4", {"k": target("fp4")}), Side("mine", {"k": target("fine")})
    result = run(Comparison(*sides), AbSettings(), floors={})
    assert (result.outcomes, result.left_out) == ((), {"k": "fp4: rmsnorm/fp4 takes no H=32"})


def test_records_of_a_run_are_judged_as_it_was(fake, tmp_path):
    fake.checks |= {("B", "wrong"): ("INCORRECT", "error 3.0"), ("A", "broken"): ("TIMEOUT", "8 s")}
    fake.checks |= {(side, "fp4"): ("UNSUPPORTED", "needs sm100") for side in "AB"}
    fake.seconds |= {("B", "slow"): 1.1 * MS, ("B", "fast"): 0.9 * MS}
    fake.more["B", "warm"] = {"l2_state": "warm"}
    names = ("wrong", "broken", "fp4", "slow", "fast", "same", "warm")
    result = compared(*names, gone=("same",))
    live = {f"rmsnorm/{key} T=4,H=32,eps=1e-06 fp32": verdict for key, (verdict, _) in verdicts(result).items()}
    assert set(live.values()) == {"INCORRECT", "FAILED", "SLOWER", "FASTER", "MISSING", "INVALID"}
    judged, a, b = save(result, tmp_path)
    effects = {record.kernel: record.metrics.get("effect") for record in read(judged)}
    assert [effects[name] for name in ("slow", "fast", "wrong")] == [pytest.approx(0.1), pytest.approx(-0.1), None]
    again = compare_files(a, b, Rules())
    assert {outcome.key: outcome.verdict for outcome in again} == live
    assert exit_status(again) == exit_status(result.outcomes) == 11
    for record in (*read(a), *read(b)):
        assert why_not(record), "a process of an A/B is no point of a trend"


def test_a_self_test_judges_times_alone_and_keeps_nothing_that_was_slowed(fake, tmp_path, monkeypatch):
    """On CUDA both sides are one device code in A against A, which must not hide a false alarm, nor a slowdown."""
    measure = Fake.measure

    def slower(self, side, keys):
        share = 1 + self.comparison.side(side).slow_down
        found = measure(self, side, keys)
        return {key: replace(one, latency_median_ms=one.latency_median_ms * share) for key, one in found.items()}

    def tested(pairs, out=None):
        wanted = Subset(("rmsnorm",), ("naive",))
        return modes.of_self_test(wanted, AbSettings(pairs=pairs), 1, None, out, lambda text: None)

    fake.more |= {(side, "naive"): {"activity_hash": "one"} for side in "AB"}
    monkeypatch.setattr(self_test, "remember_floors", lambda *arguments: None)
    monkeypatch.setattr(Fake, "measure", slower)
    report = tested(5, tmp_path)
    assert [outcome.verdict for outcome in report.outcomes] == ["SAME", "SLOWER"], report.outcomes
    assert report.exit_status(strict=True) == 0 and not report.saw_nothing
    kept = [record for file in tmp_path.glob("*.jsonl") for record in read(file)]
    assert kept and {record.verdict for record in kept} == {"SAME", None}
    assert max(record.latency_median_ms for record in kept) < 1.01
    blind = tested(2)
    assert blind.saw_nothing and (blind.exit_status(strict=True), blind.exit_status(strict=False)) == (12, 0)
    fake.seconds["B", "naive"] = 1.1 * MS
    alarmed = tested(5)
    assert "A against A is called SLOWER" in alarmed.faults[0] and alarmed.exit_status(strict=False) == 11

"""First calls and readings of few samples: what is outside the budget, what is NOISY, what an A/B makes of it.

The clock is simulated.
"""

import contextlib
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from test_timing import FakeTimer, nothing

from rooflab.bench.ab import pairs, worker
from rooflab.bench.ab.compare import compare
from rooflab.bench.core import functions as core_functions
from rooflab.bench.core.noise import few
from rooflab.bench.core.timers import Flush, cpu, timing
from rooflab.bench.core.timers.cpu import CpuTimer
from rooflab.bench.core.timers.timing import time_functions


class Clock:
    """A simulated clock: work moves it, and reading it moves it a little."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-8
        return self.now

    def work(self, seconds):
        self.now += seconds

    def kernel(self, *first, then=400e-6):
        """A function whose first calls take the seconds of `first`, and the others `then`."""
        calls = itertools.chain(first, itertools.repeat(then))
        return lambda: self.work(next(calls))


@pytest.fixture
def clock(monkeypatch):
    """The clock of the budget and of `watch_on`."""
    simulated = Clock()
    monkeypatch.setattr(timing, "perf_counter", simulated)
    monkeypatch.setattr(cpu, "pinned_threads", contextlib.nullcontext)
    monkeypatch.setattr(timing, "few", few)
    return simulated


def watch_on(clock):
    """The timer of a CPU whose flush takes 1.5 ms."""

    class SlowFlush(Flush):
        def __call__(self):
            clock.work(1.5e-3)

    watch = CpuTimer(cold=False, clock=clock)
    watch.flush = SlowFlush("cpu", 0)
    return watch


@pytest.mark.parametrize("slow", [(0.3,), (0.3, 0.3), (0.001, 0.3)])
def test_a_slow_first_call_takes_no_samples_away_and_is_reported_by_itself(clock, slow):
    """A second call too: it may compile for inputs that are not those of the first."""
    plain, late = (
        time_functions({"f": clock.kernel(*first)}, budget_s=0.15, timer=watch_on(clock))["f"] for first in ((), slow)
    )
    assert len(plain.seconds) == len(late.seconds) == 76 and plain.noise == late.noise == ""
    assert late.seconds == pytest.approx(plain.seconds, rel=1e-3)
    assert late.first_call_s == pytest.approx(0.3) and plain.first_call_s == pytest.approx(400e-6, rel=1e-3)


def test_a_slow_first_call_is_not_the_estimate_of_a_short_function(clock):
    late, plain = (
        time_functions({"f": clock.kernel(*first, then=1e-8)}, budget_s=0.15, timer=watch_on(clock))["f"]
        for first in ((0.3, 0.3), ())
    )
    assert late.calls_per_sample == plain.calls_per_sample > 1 and late.resolved


def test_the_first_call_of_each_function_is_its_own(clock):
    functions = {"late": clock.kernel(0.3), "plain": clock.kernel(), "known": clock.kernel()}
    functions["known"].first_call_s = 2.0
    read = time_functions(functions, budget_s=0.15, timer=watch_on(clock))
    found = {name: samples.first_call_s for name, samples in read.items()}
    assert found == pytest.approx({"late": 0.3, "plain": 400e-6, "known": 2.0}, rel=1e-3)
    assert len({len(samples.seconds) for samples in read.values()}) == 1 and len(read["late"].seconds) > 20


def test_a_reading_of_fewer_samples_than_its_time_has_room_for_is_noisy(clock):
    def timed(*first, then=400e-6, **options):
        watch = watch_on(clock)
        return time_functions({"f": clock.kernel(*first, then=then)}, budget_s=0.15, timer=watch, **options)["f"]

    once = timed(*[400e-6] * 8, 0.15)  # a call that compiles again is the whole budget
    assert len(once.seconds) >= 14 and once.noise == once.few == "", "it goes on until it has enough"
    twice = timed(*[400e-6] * 8, 0.15, 0.15)
    assert len(twice.seconds) == 5 and twice.noise == twice.few
    assert twice.few == "it has 5 samples, and its time has room for 55: some calls were far slower than the others"
    patient = timed(*[400e-6] * 8, 0.15, 0.15, more_s=0.3)
    assert len(patient.seconds) >= 14 and patient.noise == patient.few == ""
    long = timed(then=0.3)
    assert len(long.seconds) == 5 and long.few == "", "a slow kernel has no room for more"


def test_a_caller_who_wants_more_samples_than_the_protocol_gets_them():
    wanted = timing.MAX_SAMPLES + 5
    read = time_functions({"f": nothing}, budget_s=1e-9, min_samples=wanted, timer=FakeTimer(), renew=nothing)
    assert len(read["f"].seconds) == wanted and read["f"].few == ""


CLOCK = Clock()
CALLED = dict.fromkeys(("slow_first", "plain"), 0)
"""Calls of each function in the process that runs."""


def work(name, x):
    """400 us, and 30% more at first, as in a process whose caches are cold."""
    CLOCK.work(400e-6 * (1 + 0.3 * 0.9 ** CALLED[name]))
    CALLED[name] += 1
    return x + 1


def slow_first(x):
    if not CALLED["slow_first"]:
        CLOCK.work(0.3)
    return work("slow_first", x)


def plain(x):
    return work("plain", x)


def ones():
    return torch.ones(4)


@pytest.mark.parametrize("late_is", ["mine", "reference"])
def test_a_slow_first_call_makes_no_function_slower(monkeypatch, late_is):
    """On a simulated clock, and each process in this one, with functions that it has not called."""

    def process(side, job, limit_s):
        CALLED.update(dict.fromkeys(CALLED, 0))
        return worker.answer(json.loads(json.dumps(job)))

    monkeypatch.setattr(pairs, "ask_process", process)
    monkeypatch.setattr(timing, "perf_counter", CLOCK)
    monkeypatch.setattr(core_functions, "time", SimpleNamespace(perf_counter=CLOCK))
    monkeypatch.setattr(cpu, "pinned_threads", contextlib.nullcontext)
    monkeypatch.setattr(timing, "timer_for", lambda *of: watch_on(CLOCK))
    functions = (slow_first, plain) if late_is == "mine" else (plain, slow_first)
    found = compare(*functions, ones, pairs=8, kernel_s=0.15, progress=lambda text: None)
    assert found.verdict == "SAME", str(found)
    readings = [(side, record) for side, _, record in found.result.read]
    assert all(record.sample_count in (76, 79) for _, record in readings), "79 where the outputs are judged"
    first = {side: record.metrics["first_call_ms"] / 1e3 for side, record in readings}
    late, other = ("B", "A") if late_is == "mine" else ("A", "B")
    assert first[late] == pytest.approx(0.3005, abs=1e-3) and first[other] < 1e-3
    ms = ("301 ms", "0.52 ms") if late_is == "mine" else ("0.52 ms", "301 ms")
    assert f"First call, not in these times: {ms[0]} against {ms[1]}." in str(found)

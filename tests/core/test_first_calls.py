"""First calls and readings of few samples: time outside the budget, NOISY readings, and the verdicts of an A/B.

The clock is simulated.
"""

import contextlib
import itertools

import pytest

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
    """The clock of the budget and of the timer."""
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
def test_a_slow_first_call_takes_no_samples_away(clock, slow):
    """A second call too: it may compile for inputs that are not those of the first."""
    plain, late = (
        time_functions({"f": clock.kernel(*first)}, budget_s=0.15, timer=watch_on(clock))["f"] for first in ((), slow)
    )
    assert len(plain.seconds) == len(late.seconds) == 76 and plain.noise == late.noise == ""
    assert late.seconds == pytest.approx(plain.seconds, rel=1e-3)


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

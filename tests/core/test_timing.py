"""The timer, the timer of a CPU with its pinned threads, the cache flush and its description, and peak memory."""

import contextlib
import gc
import itertools
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from rooflab.bench.core.noise import Samples, why_noisy, with_reading
from rooflab.bench.core.record import Record
from rooflab.bench.core.timers import Flush, Timer, cpu, timing
from rooflab.bench.core.timers.cpu import CpuTimer, pinned_threads
from rooflab.bench.core.timers.timing import time_functions
from rooflab.kernels import _waiting as waiting


class FakeTimer(Timer):
    """Reads what a script says and remembers in which order it was asked."""

    def __init__(self, script=lambda name, turn: 1.0, step=1e-3):
        self.script = script
        self.step = step
        self.rounds_seen = []

    def round(self, calls, observe=None):
        self.rounds_seen.append([(name, count) for name, _, count in calls])
        return {name: self.script(name, len(self.rounds_seen)) * count for name, _, count in calls}

    def step_s(self, readings):
        return self.step

    def method(self, name):
        return "script"


def nothing():
    return None


@pytest.mark.parametrize(
    "seconds, waiting, why",
    [
        ([1.0, 1.1, 0.9, 1.2, 1.0, 1.1], None, ""),
        ([1.0] * 6, 0.34, "other processes were running: for each second of work, the threads waited 0.34 s"),
        ([1.0, 1.0, 4.0, 1.0, 4.0, 1.0, 1.0, 4.0], 0.01, "the samples' 80th percentile is 4 times their 20th"),
        ([1.0] * 6 + [1.6] * 6, 0.01, "the median of the later half of the samples is 1.6 times that of"),
        ([1.6] * 6 + [1.0] * 6, 0.01, "the median of the later half of the samples is 0.62 times that of"),
        ([1.0] * 19 + [75.0], 0.01, ""),
        ([1.0], 0.01, ""),
    ],
)
def test_noise_is_waiting_threads_spread_or_drift(seconds, waiting, why):
    found = why_noisy(seconds, waiting)
    assert found.startswith(why) and bool(found) == bool(why), found


def test_a_noisy_reading_gets_more_samples_until_it_is_none(monkeypatch):
    monkeypatch.setattr(timing, "why_noisy", why_noisy)
    now = itertools.count(step=0.01)
    monkeypatch.setattr(timing, "perf_counter", lambda: next(now))
    quiet = time_functions({"f": nothing}, budget_s=1.0, more_s=9.0, timer=FakeTimer())["f"]
    assert len(quiet.seconds) < 120 and quiet.noise == ""
    settling = FakeTimer(lambda name, turn: 1.0 if turn > 60 else 4.0)
    settled = time_functions({"f": nothing}, budget_s=1.0, more_s=9.0, timer=settling)["f"]
    assert 120 < len(settled.seconds) < 400 and settled.seconds[0] == 4.0 and settled.noise == ""
    endless = FakeTimer(lambda name, turn: 1.0 + 3.0 * (turn % 2))
    noisy = time_functions({"f": nothing}, budget_s=1.0, more_s=1.0, timer=endless)["f"]
    assert len(noisy.seconds) > 1.5 * len(quiet.seconds) and "4 times their 20th" in noisy.noise


@pytest.mark.skipif(not waiting.run_times(), reason="this system does not tell how long threads wait")
def test_threads_that_wait_for_a_processor_are_seen(monkeypatch):
    monkeypatch.setattr(cpu, "pinned_threads", contextlib.nullcontext)
    watch, allowed = CpuTimer(cold=False), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with watch.sampling() as waiting_s:
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same processor
            until = time.perf_counter() + 0.5
            while time.perf_counter() < until:
                pass
            other.kill()
            other.wait()
            assert waiting_s() > 0.2
    finally:
        os.sched_setaffinity(0, allowed)


def test_percentiles_are_per_call():
    samples = Samples((5.0, 1.0, 3.0, 2.0, 4.0), "script", "cold")
    made = with_reading(Record(kind="bench", run_id="r", status="OK", environment={}), samples, None)
    assert (made.latency_p20_ms, made.latency_p80_ms) == pytest.approx((1800.0, 4200.0))
    assert samples.median_s == 3.0 and made.latency_median_ms == 3000.0


def test_functions_are_interleaved_and_every_one_takes_every_place():
    watch = FakeTimer(lambda name, turn: float(turn))
    read = time_functions(dict.fromkeys("abc", nothing), min_samples=12, budget_s=1e-9, timer=watch)
    measured = [[name for name, _ in order] for order in watch.rounds_seen[1:]]
    assert len(measured) == 12 and all(sorted(order) == ["a", "b", "c"] for order in measured)
    for place in range(3):
        assert {order[place] for order in measured[:6]} == {"a", "b", "c"}
    assert measured[0] == measured[1][::-1]
    assert read["a"].seconds == tuple(float(turn) for turn in range(2, 14)), "raw, in the order of time"


def test_warming_up_ends_when_nothing_gets_faster():
    speeds = [8.0, 4.0, 2.0, 1.0, 0.99, 0.98]
    watch = FakeTimer(lambda name, turn: speeds[min(turn, len(speeds)) - 1] if name == "late" else 1.0)
    read = time_functions({"late": nothing, "early": nothing}, min_samples=3, budget_s=0.2, timer=watch)
    assert read["late"].seconds[0] == 0.98, "rounds 1 to 4 get faster, round 5 does not and ends the warm-up"


def test_the_budget_ends_the_sampling_but_not_before_the_least_samples():
    began = time.monotonic()
    read = time_functions({"a": lambda: time.sleep(0.01)}, budget_s=0.3, cold=False)["a"]
    assert time.monotonic() - began > 0.25 and 5 <= len(read.seconds) <= 30 and read.median_s >= 0.01
    assert len(time_functions({"a": lambda: time.sleep(0.01)}, budget_s=0.001, min_samples=7)["a"].seconds) == 7
    many = FakeTimer()
    assert len(time_functions({"a": nothing}, budget_s=5, timer=many)["a"].seconds) == timing.MAX_SAMPLES


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"functions": {}}, "functions"),
        ({"budget_s": 0}, "budget_s"),
        ({"budget_s": math.nan}, "budget_s"),
        ({"min_samples": 0}, "min_samples"),
        ({"device": "meta"}, "device"),
        ({"flush": "wish"}, "flush"),
    ],
)
def test_a_bad_argument_is_refused_by_its_name(changes, named):
    with pytest.raises(ValueError, match=f"^{named}: expected "):
        time_functions(**({"functions": {"a": nothing}} | changes))


def test_calls_too_short_for_the_clock_share_a_sample():
    watch = FakeTimer(lambda name, turn: 1e-3 if name == "short" else 1.0, step=1e-3)
    read = time_functions({"short": nothing, "long": nothing}, min_samples=2, budget_s=1e-9, timer=watch)
    assert dict(watch.rounds_seen[-1]) == {"short": 20, "long": 1}
    assert read["short"].median_s == pytest.approx(1e-3)
    assert (read["short"].calls_per_sample, read["short"].l2_state, read["short"].resolved) == (20, "warm", True)
    assert (read["long"].calls_per_sample, read["long"].l2_state, read["long"].resolved) == (1, "cold", True)


def test_what_the_clock_cannot_see_is_unresolved():
    invisible = time_functions({"a": nothing}, min_samples=2, budget_s=1e-9, timer=FakeTimer(lambda name, turn: 0.0))
    assert not invisible["a"].resolved and invisible["a"].calls_per_sample == timing.MAX_CALLS_PER_SAMPLE


def test_the_cache_is_emptied_by_twice_its_size_before_each_sample(monkeypatch):
    monkeypatch.setattr(cpu, "last_level_cache_bytes", lambda: 4000)
    log = []
    watch = CpuTimer(clock=lambda: log.append("clock") or float(len(log)))
    assert watch.flush.buffer.nbytes == 8000
    watch.flush = lambda: log.append("flush")
    del log[:]
    watch.round([("a", lambda: log.append("a"), 2), ("b", lambda: log.append("b"), 1)])
    assert log == ["flush", "clock", "a", "a", "clock", "flush", "clock", "b", "clock"]


def test_the_garbage_collector_rests_and_comes_back():
    seen = []
    time_functions({"a": lambda: seen.append(gc.isenabled())}, budget_s=1e-6, min_samples=1, cold=False)
    assert not any(seen) and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        time_functions({"a": lambda: 1 // 0}, cold=False)
    assert gc.isenabled()


def test_a_clock_replaced_while_it_is_read_is_the_fault_of_every_reading(monkeypatch):
    def cheats():
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)

    read = time_functions({"cheats": cheats, "honest": nothing}, budget_s=1e-6, min_samples=2, cold=False)
    assert read["cheats"].fault == read["honest"].fault
    assert read["honest"].fault.startswith("time.perf_counter was replaced (test_timing.py:")
    assert all(sample > 0 for sample in read["honest"].seconds), "the timer keeps the clock that it began with"
    monkeypatch.undo()
    assert time_functions({"honest": nothing}, budget_s=1e-6, min_samples=2, cold=False)["honest"].fault == ""


def test_a_clock_replaced_before_the_first_import_changes_no_reading_and_is_named():
    """A frozen one would let the timer wait for ever."""
    lines = """
        import time
        sleep = time.sleep
        time.perf_counter = time.monotonic = lambda: 0.0
        from rooflab.bench.core.timers.timing import time_functions
        read = time_functions({"a": lambda: sleep(0.01)}, budget_s=0.05, min_samples=2, cold=False)["a"]
        assert read.median_s > 0.009 and "time.perf_counter was replaced" in read.fault, read
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], check=True, timeout=100)


def test_whatever_times_in_bench_takes_the_clock_that_nobody_else_has():
    """The emulator has limits and no times."""
    rooms = Path(timing.__file__).parents[2]
    named = {"base/system_time.py", "core/timers/__init__.py"}
    own = {
        path.relative_to(rooms).as_posix()
        for path in rooms.rglob("*.py")
        if re.search(r"^\s*(import time\b|from time import)", path.read_text(), re.MULTILINE)
    }
    assert {path for path in own if not path.startswith("emulator/")} == named


CPU = torch.device("cpu")


def test_a_flush_reads_or_writes_twice_the_cache():
    read, write, empty = (Flush("cpu", size, how) for size, how in ((4000, "read"), (4000, "write"), (0, "write")))
    assert [flush.buffer.nbytes for flush in (read, write, empty)] == [8000, 8000, 0]
    for emptying in (read, write, empty):
        emptying.buffer.fill_(math.pi)
        emptying()
    assert float(read.sink) == pytest.approx(2000 * math.pi) and bool((read.buffer == math.pi).all())
    assert bool((write.buffer == 1.0).all())
    assert (read.note, write.note, empty.note) == ("", ", flushed by writing", "")


def test_the_thread_is_held_on_one_processor_and_let_go(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), pinned_threads() as note:
        assert note == "threads pinned" and len(os.sched_getaffinity(0)) == 1
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before


def test_what_cannot_be_pinned_says_why(monkeypatch):
    allowed = len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: allowed + 1)
    with pinned_threads() as note:
        assert note == f"threads not pinned: {allowed + 1} on {allowed} processors"

    def refuses(thread, places):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    with pinned_threads() as note:
        assert note == "threads not pinned: Operation not permitted"


def test_a_thread_that_hardly_ran_does_not_make_a_reading_noise(monkeypatch):
    before = {1: (1000, 10), 2: (500, 0)}
    monkeypatch.setattr(waiting, "run_times", lambda: {1: (9000, 90), 2: (8500, 320), 3: (20, 7000)})
    assert waiting.waiting_since(before) == pytest.approx(400 / 16000)
    monkeypatch.setattr(waiting, "run_times", lambda: {1: (9000, 90), 2: (8500, 320), 3: (8000, 7000)})
    assert waiting.waiting_since(before) == pytest.approx(7400 / 24000)
    monkeypatch.setattr(waiting, "run_times", lambda: before)
    assert waiting.waiting_since(before) is None

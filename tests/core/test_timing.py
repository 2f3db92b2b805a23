"""The timer, the timer of a CPU with its pinned threads, the flush and what is said of it, peak memory."""

import contextlib
import gc
import itertools
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bars import flush
from bars.flush import compare_flushes
from fake_cuda import FakeCuda

from rooflab.bench.core import timers
from rooflab.bench.core.noise import Samples, why_noisy, with_reading
from rooflab.bench.core.record import Record
from rooflab.bench.core.settings import check_timer
from rooflab.bench.core.timers import Flush, Observed, Timer, cpu, grid_of, tampered, timing
from rooflab.bench.core.timers.cpu import CpuTimer, assign, pinned_threads, profiled
from rooflab.bench.core.timers.cupti import observed_on_cuda
from rooflab.bench.core.timers.timing import observed, time_functions
from rooflab.kernels import _waiting as waiting


class FakeTimer(Timer):
    """Reads what a script says and remembers in which order it was asked."""

    batches = True

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

    def rounds_of(self, name):
        return [turn for turn, order in enumerate(self.rounds_seen) if name in dict(order)]


def nothing():
    return None


@pytest.mark.parametrize(
    "seconds, waiting, why",
    [
        ([1.0, 1.1, 0.9, 1.2, 1.0, 1.1], 0.01, ""),
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

    def work(until):
        while time.perf_counter() < until:
            pass

    os.sched_setaffinity(0, {min(allowed)})
    try:
        with watch.sampling() as waiting_s:
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same processor
            try:
                work(time.perf_counter() + 0.5)
            finally:
                other.kill()
                other.wait()
            assert waiting_s() > 0.2
    finally:
        os.sched_setaffinity(0, allowed)


def test_percentiles_are_per_call():
    samples = Samples((5.0, 1.0, 3.0, 2.0, 4.0), "script", "cold")
    made = with_reading(Record(kind="bench", run_id="r", status="OK", environment={}), samples, None)
    found = [made.latency_p20_ms, made.latency_median_ms, made.latency_p80_ms]
    assert samples.median_s == 3.0 and found == pytest.approx([1800.0, 3000.0, 4200.0])


def test_a_sleeping_function_takes_the_time_that_it_sleeps():
    read = time_functions({"nap": lambda: time.sleep(0.004), "long nap": lambda: time.sleep(0.012)}, budget_s=0.2)
    assert 0.004 <= read["nap"].median_s < read["long nap"].median_s
    assert 0.012 <= read["long nap"].median_s < 0.05
    assert read["nap"].method.startswith("cpu perf_counter, ")
    assert read["nap"].l2_state == "cold" and read["nap"].resolved


def test_functions_are_interleaved_and_every_one_takes_every_place():
    watch = FakeTimer()
    time_functions(dict.fromkeys("abc", nothing), min_samples=12, budget_s=1e-9, timer=watch)
    measured = [[name for name, _ in order] for order in watch.rounds_seen[1:]]
    assert len(measured) == 12 and all(sorted(order) == ["a", "b", "c"] for order in measured)
    for place in range(3):
        assert {order[place] for order in measured[:6]} == {"a", "b", "c"}
    assert measured[0] == measured[1][::-1]


def test_the_order_comes_from_the_seed():
    def order(seed):
        watch = FakeTimer()
        time_functions(dict.fromkeys("abcdefgh", nothing), min_samples=2, budget_s=1e-9, seed=seed, timer=watch)
        return watch.rounds_seen[-1]

    assert order(1) == order(1) != order(2)


def test_samples_are_kept_raw_and_in_time_order():
    watch = FakeTimer(lambda name, turn: 100.0 if turn == 6 else float(turn))
    read = time_functions({"a": nothing}, min_samples=5, budget_s=1e-9, timer=watch)
    assert read["a"].seconds == (2.0, 3.0, 4.0, 5.0, 100.0)


def test_warming_up_ends_when_nothing_gets_faster():
    speeds = [8.0, 4.0, 2.0, 1.0, 0.99, 0.98]
    watch = FakeTimer(lambda name, turn: speeds[min(turn, len(speeds)) - 1] if name == "late" else 1.0)
    read = time_functions({"late": nothing, "early": nothing}, min_samples=3, budget_s=0.2, timer=watch)
    assert read["late"].seconds[0] == 0.98, "rounds 1 to 4 get faster, round 5 does not and ends the warm-up"


def test_warming_up_ends_with_its_share_of_the_budget():
    def slow(name, turn):
        time.sleep(0.03)
        return 1.0 / turn

    watch = FakeTimer(slow)
    read = time_functions({"a": nothing}, min_samples=1, budget_s=0.1, timer=watch)
    assert len(watch.rounds_seen) - len(read["a"].seconds) <= 2


def test_the_budget_ends_the_sampling_but_not_before_the_least_samples():
    began = time.perf_counter()
    read = time_functions({"a": lambda: time.sleep(0.01)}, budget_s=0.3, cold=False)
    assert 10 <= len(read["a"].seconds) <= 30 and time.perf_counter() - began < 1.5
    assert len(time_functions({"a": lambda: time.sleep(0.01)}, budget_s=0.001, min_samples=7)["a"].seconds) == 7
    many = FakeTimer()
    assert len(time_functions({"a": nothing}, budget_s=5, timer=many)["a"].seconds) == timing.MAX_SAMPLES


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
    single = FakeTimer(lambda name, turn: 5e-3)
    single.batches = False
    assert not time_functions({"a": nothing}, min_samples=2, budget_s=1e-9, timer=single)["a"].resolved


def test_a_coarse_clock_is_seen_to_be_coarse():
    ticks = (tick // 4 * 0.25 for tick in itertools.count())
    watch = CpuTimer(cold=False, clock=lambda: next(ticks))
    assert watch.step_s([]) == 0.25
    assert watch.method("a").startswith("cpu perf_counter")


def test_where_the_allocator_gives_memory_back_the_methods_name_lacks_the_note(monkeypatch):
    asked = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(mallopt=lambda *of: asked.append(of) or 1))
    assert CpuTimer(cold=False).method("a") == "cpu perf_counter, freed memory kept" and len(asked) == 2
    for libc in (SimpleNamespace(), SimpleNamespace(mallopt=lambda *of: 0)):
        monkeypatch.setattr("ctypes.CDLL", lambda name, libc=libc: libc)
        assert CpuTimer(cold=False).method("a") == "cpu perf_counter"


def test_the_grid_is_the_least_difference_that_is_no_rounding():
    assert grid_of([3e-6, 5e-6, 4e-6, 3e-6, 4e-6 + 2e-10]) == pytest.approx(1e-6, rel=1e-3)
    assert grid_of([3e-6, 3e-6]) is None


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


def test_observe_is_called_once_a_round_of_samples():
    seen = []
    read = time_functions({"a": nothing, "b": nothing}, budget_s=1e-6, cold=False, observe=lambda: seen.append(1))
    assert len(seen) == len(read["a"].seconds), "and not while warming up"


def test_bad_input_is_one_sentence():
    for changes, text in [
        ({"functions": {}}, "functions: expected at least one"),
        ({"budget_s": 0}, "budget_s: expected a positive"),
        ({"budget_s": float("nan")}, "budget_s: expected a positive"),
        ({"min_samples": 0}, "min_samples: expected at least 1"),
        ({"device": "meta"}, "device: expected cpu or cuda, got meta"),
        ({"timer": "events"}, "timer: expected one of perf_counter on cpu, got events, which needs a CUDA device"),
        ({"timer": "sundial"}, "timer: expected one of perf_counter on cpu, got sundial$"),
        ({"flush": "wish"}, "flush: expected one of read, write, got 'wish'"),
    ]:
        with pytest.raises(ValueError, match=text):
            time_functions(**({"functions": {"a": nothing}} | changes))


def test_every_device_has_a_default_timer():
    assert check_timer(None, "cpu") == "perf_counter" and check_timer(None, "cuda") == "events"
    assert check_timer("graph", "cuda") == "graph"
    with pytest.raises(ValueError, match="timer: expected one of events, graph, cupti on cuda, got perf_counter"):
        check_timer("perf_counter", "cuda")


def test_a_timer_may_read_several_rounds_together():
    class Together(FakeTimer):
        rounds_at_once = 4

        def rounds(self, orders, observe=None):
            self.asked = [*getattr(self, "asked", []), len(orders)]
            return super().rounds(orders, observe)

    watch = Together()
    read = time_functions({"a": nothing, "b": nothing}, min_samples=6, budget_s=1e-9, timer=watch)
    assert watch.asked[-2:] == [4, 4] and len(read["a"].seconds) == len(read["b"].seconds) == 8
    assert sorted(watch.rounds_of("a")) == sorted(watch.rounds_of("b"))


def test_a_clock_replaced_while_it_is_read_is_the_fault_of_every_reading(monkeypatch):
    def cheats():
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)

    read = time_functions({"cheats": cheats, "honest": nothing}, budget_s=1e-6, min_samples=2, cold=False)
    assert read["cheats"].fault == read["honest"].fault
    assert read["honest"].fault.startswith("time.perf_counter was replaced (test_timing.py:")
    assert all(sample > 0 for sample in read["honest"].seconds), "the timer keeps the clock that it began with"
    monkeypatch.undo()
    assert time_functions({"honest": nothing}, budget_s=1e-6, min_samples=2, cold=False)["honest"].fault == ""


@pytest.mark.parametrize("clock", ["lambda: 0.0", "lambda: real() / 10", "time.process_time"])
def test_a_clock_replaced_before_the_first_import_changes_no_reading_and_is_named(clock):
    """A frozen one would let the timer wait for ever, a slowed one would publish a tenth."""
    lines = f"""
        import time
        real, sleep = time.perf_counter, time.sleep
        time.perf_counter = time.monotonic = {clock}
        from rooflab.bench.core.timers.timing import time_functions
        read = time_functions({{"a": lambda: sleep(0.01)}}, budget_s=0.05, min_samples=2, cold=False)["a"]
        assert read.median_s > 0.009 and "time.perf_counter was replaced" in read.fault, read
        read = time_functions({{"a": lambda: sleep(0.01)}}, budget_s=0.05, min_samples=2, cold=False)["a"]
        assert not read.fault, read
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], check=True, timeout=100)


def test_a_clock_that_is_changed_from_inside_is_named(monkeypatch):
    """As time-machine does it: the function is Python's own, and only the system knows better."""
    libc = SimpleNamespace(clock_gettime=lambda number, reading: reading.__setitem__(0, 0))
    monkeypatch.setattr(timers, "LIBC", libc)
    assert "time.time was replaced: it is" in tampered()


def test_whatever_times_in_bench_takes_the_clock_that_nobody_else_has():
    """The emulator has limits and no times."""
    rooms = Path(timing.__file__).parents[2]
    named = {"base/system_time.py", "core/timers/__init__.py"}
    own = {path.relative_to(rooms).as_posix() for path in rooms.rglob("*.py")
           if re.search(r"^\s*(import time\b|from time import)", path.read_text(), re.MULTILINE)}  # fmt: skip
    assert {path for path in own if not path.startswith("emulator/")} == named


CPU = torch.device("cpu")


def test_a_flush_reads_or_writes_twice_the_cache():
    read, write = Flush("cpu", 4000, "read"), Flush("cpu", 4000, "write")
    assert read.buffer.nbytes == write.buffer.nbytes == 8000
    for emptying in (read, write):
        emptying.buffer.fill_(math.pi)
        emptying()
    assert float(read.sink) == pytest.approx(2000 * math.pi) and bool((read.buffer == math.pi).all())
    assert bool((write.buffer == 1.0).all())
    assert read.note == "" and write.note == ", flushed by writing"
    nothing_to_empty = Flush("cpu", 0, "write")
    nothing_to_empty()
    assert nothing_to_empty.buffer.nbytes == 0 and nothing_to_empty.note == ""


@pytest.fixture
def card(monkeypatch):
    """Replaces the timer: seconds of a read behind each flush and without one, what else it says of a read of so many
    bytes behind a flush by writing, and what it was asked."""
    seconds, details, asked = {"read": 1.0, "write": 1.0}, {}, []

    def time_functions(functions, device, *, cold, flush, **options):
        asked.append((flush, cold, [function.sets for function in functions.values()]))
        factor = seconds[flush] if cold else 1.0
        return {
            size: Samples((1e-9 * int(size) * factor,) * 3, "script", "cold",
                          **(details.get(int(size), {}) if flush == "write" else {}))
            for size in functions
        }  # fmt: skip

    monkeypatch.setattr(flush, "time_functions", time_functions)
    return seconds, details, asked


def test_the_cleaner_flush_is_the_one_nearest_to_no_flush_at_all(card):
    seconds, _, asked = card
    for read, write, cleaner in [(1.02, 1.3, "read"), (0.6, 1.1, "write"), (1.0, 1.0, "read")]:
        seconds |= {"read": read, "write": write}
        found = compare_flushes("cpu", cache_bytes=2**16)
        assert found["cleaner"] == cleaner and found["sizes_bytes"] == [2**13, 2**15, 2**17]
        assert found["read_error"] == pytest.approx(abs(read - 1)) and found["write_error"] == pytest.approx(write - 1)
        assert found["rotation_s"] == pytest.approx([size * 1e-9 for size in found["sizes_bytes"]])
    orders = [("read", True), ("write", True), ("read", False), ("read", False), ("write", True), ("read", True)]
    assert [(flush, cold) for flush, cold, _ in asked[:6]] == orders
    for _, cold, sets in asked:
        in_turn = zip(sets, found["sizes_bytes"], strict=True)
        assert sets == [1, 1, 1] if cold else all(n * size > 4 * 2**16 and n >= 2 for n, size in in_turn)


def test_a_size_with_a_reading_that_says_nothing_of_the_flush_is_left_out(card):
    _, details, _ = card
    for told, why in [
        ({"calls_per_sample": 20}, "20 calls per sample, of which the flush stands before the first"),
        ({"fault": "kernels changed"}, "kernels changed"),
        ({"resolved": False}, "the script timer is too coarse for it"),
    ]:
        details.clear()
        details[2**13] = told
        found = compare_flushes("cpu", cache_bytes=2**16)
        assert found["sizes_bytes"] == [2**15, 2**17] and found["left_out"] == {str(2**13): why}
        assert all(len(found[name]) == 2 for name in ("read_s", "write_s", "rotation_s"))
        details.update({2**15: told, 2**17: told})
        with pytest.raises(ValueError, match="flush: expected a size of which every reading counts, got none"):
            compare_flushes("cpu", cache_bytes=2**16)


X = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
BYTES = X.nbytes


def test_peak_memory_is_what_a_call_holds_beyond_what_it_returns():
    for call, peak in [
        (lambda: X + 1, 0),
        (lambda: (X + 1) * 2, BYTES),
        (lambda: ((X + 1) * 2).mul_(3).sum(), 2 * BYTES),
        (lambda: torch.add(X, 1, out=torch.empty_like(X)), 0),
        (lambda: (X + 1, X + 2), 0),
        (lambda: X.mul(1.0) is None, BYTES),
    ]:
        assert observed(call, CPU).peak_memory_bytes == pytest.approx(peak, abs=256)


def test_peak_memory_of_a_gpu_is_that_of_its_allocator(monkeypatch):
    """Peak 900, of which 100 were there before and 300 are what was returned."""
    held = iter([100.0, 400.0])
    for name, value in {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: next(held),
        "max_memory_allocated": lambda device: 900.0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with profiled():  # what the device ran is then left open
        assert observed_on_cuda(lambda: None, FakeCuda()) == Observed(500.0)


CORES = {0: "a", 1: "a", 2: "b", 3: "b"}
"""Two cores of two hardware threads each."""


def test_threads_stay_where_they_are_and_share_no_core_while_one_is_free():
    for wanted, allowed, places in [
        ([2], {0, 1, 2, 3}, [2]),
        ([0, 2], {0, 1, 2, 3}, [0, 2]),
        ([0, 0], {0, 1, 2, 3}, [0, 2]),
        ([0, 1], {0, 1, 2, 3}, [0, 2]),
        ([3, 3, 3, 3], {0, 1, 2, 3}, [3, 0, 1, 2]),
        ([0, 1], {0, 1}, [0, 1]),
        ([5, 0], {0, 2}, [2, 0]),
    ]:
        assert assign(wanted, allowed, CORES | {5: "c"}) == places


def test_the_thread_is_held_on_one_processor_and_let_go(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), pinned_threads() as note:
        assert note == "threads pinned" and len(os.sched_getaffinity(0)) == 1
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_was_started_meanwhile_may_leave(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    allowed = os.sched_getaffinity(0)
    stop = threading.Event()
    with pinned_threads():
        thread = threading.Thread(target=stop.wait)
        thread.start()
        assert len(os.sched_getaffinity(thread.native_id)) == 1, "it has inherited the processor"
    found = os.sched_getaffinity(thread.native_id)
    stop.set()
    thread.join()
    assert found == allowed


def test_what_cannot_be_pinned_says_why(monkeypatch):
    allowed = os.sched_getaffinity(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: len(allowed) + 1)
        with pinned_threads() as note:
            assert note == f"threads not pinned: {len(allowed) + 1} on {len(allowed)} processors"

    def refuses(thread, places):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    with pinned_threads() as note:
        assert note == "threads not pinned: Operation not permitted"
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda thread: {*range(1000)})
        patch.setattr(torch, "get_num_threads", lambda: 1000)
        patch.setattr(cpu, "run_times", dict)
        with pinned_threads() as note:
            assert note == "threads not pinned: 1 of 1000 were found"
    monkeypatch.delattr(os, "sched_setaffinity")
    with pinned_threads() as note:
        assert note == "threads not pinned: this system does not offer it"


def test_a_thread_that_hardly_ran_does_not_make_a_reading_noise(monkeypatch):
    before = {1: (1000, 10), 2: (500, 0)}
    monkeypatch.setattr(waiting, "run_times", lambda: {1: (9000, 90), 2: (8500, 320), 3: (20, 7000)})
    assert waiting.waiting_since(before) == pytest.approx(400 / 16000)
    monkeypatch.setattr(waiting, "run_times", lambda: {1: (9000, 90), 2: (8500, 320), 3: (8000, 7000)})
    assert waiting.waiting_since(before) == pytest.approx(7400 / 24000)
    monkeypatch.setattr(waiting, "run_times", lambda: before)
    assert waiting.waiting_since(before) is None

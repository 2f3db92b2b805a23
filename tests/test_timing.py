import contextlib
import gc
import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from rooflab.bench import stopwatch as stopwatches
from rooflab.bench import timing
from rooflab.bench.stopwatch import CpuStopwatch, CudaStopwatch, stopwatch_for
from rooflab.bench.timing import Samples, time_functions


class FakeStopwatch:
    """Reads what a script says and remembers in which order it was asked."""

    batches = True

    def __init__(self, script=lambda name, turn: 1.0, step=1e-3):
        self.script = script
        self.step = step
        self.rounds = []

    def round(self, calls):
        self.rounds.append([(name, count) for name, _, count in calls])
        return {name: self.script(name, len(self.rounds)) * count for name, _, count in calls}

    def step_s(self, readings):
        return self.step

    def method(self, name, calls):
        return "script"


def nothing():
    return None


def test_percentiles_are_per_call():
    samples = Samples((5.0, 1.0, 3.0, 2.0, 4.0), "script", "cold")
    assert (samples.median_s, samples.p20_s, samples.p80_s) == pytest.approx((3.0, 1.8, 4.2))


def test_a_sleeping_function_takes_the_time_that_it_sleeps():
    read = time_functions({"nap": lambda: time.sleep(0.004), "long nap": lambda: time.sleep(0.012)}, budget_s=0.2)
    assert 0.004 <= read["nap"].median_s < read["long nap"].median_s
    assert 0.012 <= read["long nap"].median_s < 0.05
    assert read["nap"].method == "cpu perf_counter" and read["nap"].l2_state == "cold" and read["nap"].resolved


def test_functions_are_interleaved_and_every_one_takes_every_place():
    watch = FakeStopwatch()
    time_functions(dict.fromkeys("abc", nothing), min_samples=12, budget_s=1e-9, stopwatch=watch)
    measured = [[name for name, _ in order] for order in watch.rounds[1:]]
    assert len(measured) == 12 and all(sorted(order) == ["a", "b", "c"] for order in measured)
    for place in range(3):
        assert {order[place] for order in measured[:6]} == {"a", "b", "c"}
    assert measured[0] == measured[1][::-1]


def test_the_order_comes_from_the_seed():
    def order(seed):
        watch = FakeStopwatch()
        time_functions(dict.fromkeys("abcdefgh", nothing), min_samples=2, budget_s=1e-9, seed=seed, stopwatch=watch)
        return watch.rounds[-1]

    assert order(1) == order(1) != order(2)


def test_samples_are_kept_raw_and_in_time_order():
    watch = FakeStopwatch(lambda name, turn: 100.0 if turn == 6 else float(turn))
    read = time_functions({"a": nothing}, min_samples=5, budget_s=1e-9, stopwatch=watch)
    assert read["a"].seconds == (2.0, 3.0, 4.0, 5.0, 100.0)


def test_warming_up_ends_when_nothing_gets_faster():
    speeds = [8.0, 4.0, 2.0, 1.0, 0.99, 0.98]
    watch = FakeStopwatch(lambda name, turn: speeds[min(turn, len(speeds)) - 1] if name == "late" else 1.0)
    read = time_functions({"late": nothing, "early": nothing}, min_samples=3, budget_s=0.2, stopwatch=watch)
    assert read["late"].seconds[0] == 0.98, "rounds 1 to 4 get faster, round 5 does not and ends the warm-up"


def test_warming_up_ends_with_its_share_of_the_budget():
    def slow(name, turn):
        time.sleep(0.03)
        return 1.0 / turn

    watch = FakeStopwatch(slow)
    read = time_functions({"a": nothing}, min_samples=1, budget_s=0.1, stopwatch=watch)
    assert len(watch.rounds) - len(read["a"].seconds) <= 2


def test_the_budget_ends_the_sampling_but_not_before_the_least_samples():
    began = time.perf_counter()
    read = time_functions({"a": lambda: time.sleep(0.01)}, budget_s=0.3, cold=False)
    assert 10 <= len(read["a"].seconds) <= 30 and time.perf_counter() - began < 1.5
    assert len(time_functions({"a": lambda: time.sleep(0.01)}, budget_s=0.001, min_samples=7)["a"].seconds) == 7
    many = FakeStopwatch()
    assert len(time_functions({"a": nothing}, budget_s=5, stopwatch=many)["a"].seconds) == timing.MAX_SAMPLES


def test_calls_too_short_for_the_clock_share_a_sample():
    watch = FakeStopwatch(lambda name, turn: 1e-3 if name == "short" else 1.0, step=1e-3)
    read = time_functions({"short": nothing, "long": nothing}, min_samples=2, budget_s=1e-9, stopwatch=watch)
    assert dict(watch.rounds[-1]) == {"short": 20, "long": 1}
    assert read["short"].median_s == pytest.approx(1e-3)
    assert (read["short"].calls_per_sample, read["short"].l2_state, read["short"].resolved) == (20, "warm", True)
    assert (read["long"].calls_per_sample, read["long"].l2_state, read["long"].resolved) == (1, "cold", True)


def test_what_the_clock_cannot_see_is_unresolved():
    invisible = time_functions(
        {"a": nothing}, min_samples=2, budget_s=1e-9, stopwatch=FakeStopwatch(lambda name, turn: 0.0)
    )
    assert not invisible["a"].resolved and invisible["a"].calls_per_sample == timing.MAX_CALLS_PER_SAMPLE
    single = FakeStopwatch(lambda name, turn: 5e-3)
    single.batches = False
    assert not time_functions({"a": nothing}, min_samples=2, budget_s=1e-9, stopwatch=single)["a"].resolved


def test_a_coarse_clock_is_seen_to_be_coarse():
    ticks = (tick // 4 * 0.25 for tick in itertools.count())
    watch = CpuStopwatch(cold=False, clock=lambda: next(ticks))
    assert watch.step_s([]) == 0.25
    assert watch.method("a", 1) == "cpu perf_counter" and "8 calls" in watch.method("a", 8)


def test_the_cache_is_emptied_by_twice_its_size_before_each_sample(monkeypatch):
    monkeypatch.setattr(stopwatches, "last_level_cache_bytes", lambda: 4000)
    log = []
    watch = CpuStopwatch(clock=lambda: log.append("clock") or float(len(log)))
    assert watch._flush.nbytes == 8000
    watch._flush = SimpleNamespace(sum=lambda: log.append("flush"))
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


def test_observe_is_called_once_a_round():
    seen = []
    read = time_functions({"a": nothing, "b": nothing}, budget_s=1e-6, cold=False, observe=lambda: seen.append(1))
    assert len(seen) == len(read["a"].seconds) + 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"functions": {}}, "functions: expected at least one"),
        ({"budget_s": 0}, "budget_s: expected a positive"),
        ({"budget_s": float("nan")}, "budget_s: expected a positive"),
        ({"min_samples": 0}, "min_samples: expected at least 1"),
        ({"device": "meta"}, "device: expected cpu or cuda, got meta"),
    ],
)
def test_bad_input_is_one_sentence(changes, text):
    with pytest.raises(ValueError, match=text):
        time_functions(**({"functions": {"a": nothing}} | changes))


class FakeCuda:
    """A device that works through a queue behind the host; times in seconds, the sleep clock at 1 GHz."""

    HOST_S = 5e-6
    """What the host needs for each call into CUDA."""

    def __init__(self, monkeypatch):
        self.host_s = 0.0
        self.device_s = 0.0
        cuda = self

        class Event:
            def __init__(self, enable_timing=False):
                self.at_s = None

            def record(self):
                cuda.work(0.0)
                self.at_s = cuda.device_s

            def query(self):
                return cuda.host_s >= self.at_s

            def synchronize(self):
                cuda.host_s = max(cuda.host_s, self.at_s)

            def elapsed_time(self, end):
                return (end.at_s - self.at_s) * 1e3

        for name, value in {
            "Event": Event,
            "_sleep": lambda cycles: self.work(cycles / 1e9),
            "synchronize": lambda device: self.wait(),
            "device": lambda device: contextlib.nullcontext(),
            "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=4000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def work(self, seconds):
        self.host_s += self.HOST_S
        self.device_s = max(self.device_s, self.host_s) + seconds

    def wait(self):
        self.host_s = max(self.host_s, self.device_s)


def test_cuda_events_hide_the_launches_behind_a_wait(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def three_launches():
        for _ in range(3):
            cuda.host_s += 100e-6  # host work that a device without a backlog would wait for
            cuda.work(10e-6)

    watch = CudaStopwatch(torch.device("cpu"))
    assert watch._flush.nbytes == 8000 and watch._cycles_per_s == pytest.approx(1e9, rel=1e-2)
    read = watch.round([("three", three_launches, 1), ("one", lambda: cuda.work(20e-6), 1)])
    assert read == pytest.approx({"three": 30e-6, "one": 20e-6})
    assert watch._backlog_s > 300e-6, "the wait grew until it outlasted the host"
    assert watch.method("three", 1) == "cuda events, launch gaps hidden"


def test_a_function_that_waits_for_the_device_is_named_so_and_holds_up_no_other(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def synchronous():
        cuda.work(10e-6)
        cuda.wait()
        cuda.work(10e-6)

    watch = CudaStopwatch(torch.device("cpu"))
    calls = [("synchronous", synchronous, 1), ("plain", lambda: cuda.work(20e-6), 1)]
    for _ in range(2):
        read = watch.round(calls)
    assert read["plain"] == pytest.approx(20e-6) and read["synchronous"] > 20e-6
    assert watch.method("synchronous", 1) == "cuda events, launch gaps included"
    assert watch.method("plain", 1) == "cuda events, launch gaps hidden"
    before = cuda.device_s
    watch.round(calls[:1])
    assert cuda.device_s - before < stopwatches.MAX_BACKLOG_S, "it is no longer put behind a wait"


def test_compilation_is_not_waited_for(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    compiled = []

    def compiles_first():
        if not compiled:
            cuda.host_s += 3.0
            compiled.append(True)
        cuda.work(10e-6)

    watch = CudaStopwatch(torch.device("cpu"), cold=False)
    assert watch.round([("a", compiles_first, 1)])["a"] == pytest.approx(10e-6)
    assert watch._backlog_s == pytest.approx(2e-4)


def test_the_grid_of_event_times_is_read_from_the_readings(monkeypatch):
    FakeCuda(monkeypatch)
    watch = CudaStopwatch(torch.device("cpu"))
    assert watch.step_s([3e-6, 5e-6, 4e-6, 3e-6]) == pytest.approx(1e-6)
    assert watch.step_s([3e-6, 3e-6]) == 1.024e-6, (
        "readings that are all one say nothing of the grid: the coarsest known"
    )


def test_cuda_gets_the_event_timer(monkeypatch):
    made = []
    monkeypatch.setattr(stopwatches, "CudaStopwatch", lambda *arguments: made.append(arguments))
    stopwatch_for(torch.device("cuda"), True, None)
    assert made == [(torch.device("cuda"), True, None)]


@pytest.mark.gpu
def test_a_matrix_product_on_the_gpu_takes_a_plausible_time():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    read = time_functions({"mm": lambda: a @ a, "small": lambda: a[:1] + 1}, "cuda", budget_s=0.5)
    assert 2 * 4096**3 / read["mm"].median_s < 2.5e15
    assert 1e-6 < read["small"].median_s < read["mm"].median_s
    assert read["mm"].method == "cuda events, launch gaps hidden"

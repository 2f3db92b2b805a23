import pytest
import torch
from fake_cuda import FakeCuda

from rooflab.bench.timing import cuda_events
from rooflab.bench.timing.cuda_events import MAX_BACKLOG_S, MIN_BACKLOG_S, REMEMBERED, EventStopwatch
from rooflab.bench.timing.cuda_graph import GraphStopwatch
from rooflab.bench.timing.stopwatch import COARSE_STEP_S
from rooflab.bench.timing.timing import time_functions

CPU = torch.device("cpu")


def stopwatch(cuda, **options):
    return EventStopwatch(CPU, cuda=cuda, clock=cuda.clock, **options)


def test_the_launches_are_hidden_behind_a_wait():
    cuda = FakeCuda()

    def three_launches():
        for _ in range(3):
            cuda.host_s += 100e-6  # host work that a device without a backlog would wait for
            cuda.work(10e-6)

    watch = stopwatch(cuda)
    assert watch.flush.nbytes == 8000
    read = watch.round([("three", three_launches, 1), ("one", lambda: cuda.work(20e-6), 1)])
    assert read == pytest.approx({"three": 30e-6, "one": 20e-6})
    assert watch.backlog.length_s("three") > 300e-6, "the wait grew until it outlasted the host"
    assert watch.backlog.length_s("one") == MIN_BACKLOG_S, "and nobody else's with it"
    assert watch.method("three", 1) == "cuda events, launch gaps hidden"


def test_a_hiccup_of_the_host_is_forgotten():
    cuda = FakeCuda()
    hiccups = [0.0, 0.0, 5e-3]

    def stumbles():
        cuda.host_s += hiccups.pop(0) if hiccups else 0.0
        cuda.work(10e-6)

    watch = stopwatch(cuda)
    for _ in range(2):
        assert watch.round([("a", stumbles, 1)])["a"] == pytest.approx(10e-6)
    assert watch.backlog.length_s("a") == pytest.approx(10e-3, rel=0.1)
    for _ in range(REMEMBERED):
        watch.round([("a", stumbles, 1)])
    assert watch.backlog.length_s("a") == MIN_BACKLOG_S


def test_a_function_that_waits_for_the_device_is_named_so_and_holds_up_no_other():
    cuda = FakeCuda()

    def synchronous():
        cuda.work(10e-6)
        cuda.synchronize()
        cuda.work(10e-6)

    watch = stopwatch(cuda)
    calls = [("synchronous", synchronous, 1), ("plain", lambda: cuda.work(20e-6), 1)]
    for _ in range(2):
        read = watch.round(calls)
    assert read["plain"] == pytest.approx(20e-6) and read["synchronous"] > 20e-6
    assert watch.method("synchronous", 1) == "cuda events, launch gaps included"
    assert watch.method("plain", 1) == "cuda events, launch gaps hidden"
    before = cuda.device_s
    watch.round(calls[:1])
    assert cuda.device_s - before < MAX_BACKLOG_S, "it is no longer put behind a wait"


def test_compilation_is_not_waited_for():
    cuda = FakeCuda()
    compiled = []

    def compiles_first():
        if not compiled:
            cuda.host_s += 3.0
            compiled.append(True)
        cuda.work(10e-6)

    watch = stopwatch(cuda, cold=False)
    assert watch.round([("a", compiles_first, 1)])["a"] == pytest.approx(10e-6)
    assert watch.backlog.length_s("a") == MIN_BACKLOG_S


def test_a_card_that_wakes_up_is_waited_for():
    """A wait counts cycles: where an idle card's clock was taken for its clock, every wait would be too short."""

    class Waking(FakeCuda):
        def sleep(self, cycles):
            hz = 0.345e9 if self.device_s < 0.02 else 1.98e9
            self.work(cycles / hz, "spin")

    cuda = Waking()
    assert stopwatch(cuda).backlog._cycles_per_s == pytest.approx(1.98e9, rel=0.02)


def test_the_flush_lies_in_front_of_the_clock_and_behind_the_wait():
    cuda = FakeCuda()
    watch = stopwatch(cuda)
    watch.flush = lambda: cuda.work(30e-6, "flush")
    first = len(cuda.log)
    assert watch.round([("a", lambda: cuda.work(10e-6), 2)])["a"] == pytest.approx(20e-6)
    assert [work.name for work in cuda.log[first:]] == ["kernel", "spin", "flush", "kernel", "kernel"]


@pytest.mark.parametrize("step", [0.5e-6, 1.024e-6])
def test_the_grid_is_read_from_the_card_also_where_all_samples_are_one(step):
    watch = stopwatch(FakeCuda(step_s=step))
    assert watch.step_s([9 * step] * 5) == pytest.approx(step)


def test_a_card_whose_waits_all_read_the_same_is_taken_to_be_coarse():
    cuda = FakeCuda()
    cuda.seconds = lambda start, end: 5e-3
    assert stopwatch(cuda).step_s([5e-6]) == COARSE_STEP_S


def test_a_call_shorter_than_ten_steps_is_batched_and_its_cache_is_warm():
    cuda = FakeCuda(step_s=1.024e-6)
    read = time_functions(
        {"short": lambda: cuda.work(3e-6), "long": lambda: cuda.work(50e-6)},
        min_samples=3,
        budget_s=1e-9,
        stopwatch=stopwatch(cuda),
    )
    short, long = read["short"], read["long"]
    assert short.calls_per_sample > 1 and short.l2_state == "warm" and short.resolved
    assert short.median_s == pytest.approx(3e-6, rel=0.1)
    assert short.method == f"cuda events, launch gaps hidden, {short.calls_per_sample} calls per sample"
    assert long.calls_per_sample == 1 and long.l2_state == "cold" and long.resolved


def test_the_launch_floor_is_what_an_empty_kernel_reads():
    cuda = FakeCuda()
    cuda.LAUNCH_S = 2e-6
    watch = stopwatch(cuda)
    assert watch.launch_floor_s(1) == pytest.approx(2e-6) == watch.launch_floor_s(8)
    taken = len(cuda.log)
    watch.launch_floor_s(1)
    assert len(cuda.log) == taken, "read once"


def test_observers_look_once_a_round_while_the_device_works():
    cuda = FakeCuda()
    seen = []
    watch = stopwatch(cuda, observe=lambda: seen.append(cuda.device_s > cuda.host_s))
    slow = [0.0, 1e-3]

    def late_once():
        cuda.host_s += slow.pop(0) if slow else 0.0
        cuda.work(10e-6)

    with watch.sampling():
        watch.round([("late", late_once, 1), ("b", lambda: cuda.work(20e-6), 1)])
    assert seen == [True], "once, although one sample was taken again"


@pytest.mark.parametrize("timer", [EventStopwatch, GraphStopwatch])
def test_nobody_looks_at_a_warm_up_or_at_empty_kernels(timer):
    """A clock read there is that of a card without load, and there are more of those than of samples."""
    cuda, seen = FakeCuda(), []
    watch = timer(CPU, cuda=cuda, clock=cuda.clock, observe=lambda: seen.append(cuda.log[-1].name))
    options = {"min_samples": 3, "budget_s": 1e-9, "stopwatch": watch}
    read = time_functions({"a": lambda: cuda.work(50e-6)}, **options)["a"]
    assert read.launch_floor_s is not None and seen == ["kernel"] * len(read.seconds)


def test_a_flush_by_writing_is_named():
    assert stopwatch(FakeCuda(), flush="write").method("a", 1).endswith("hidden, flushed by writing")
    assert cuda_events.Flush("cpu", 0, "write").note == ""

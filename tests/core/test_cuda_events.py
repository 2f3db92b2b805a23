"""The timer of CUDA events, on a device made of Python."""

import pytest
from fake_cuda import FakeCuda

from rooflab.bench.core.timers.cuda import MAX_BACKLOG_S, MIN_BACKLOG_S, EventTimer
from rooflab.bench.core.timers.timing import time_functions


def test_the_launches_are_hidden_behind_a_wait():
    cuda = FakeCuda()

    def three_launches():
        for _ in range(3):
            cuda.host_s += 100e-6  # host work that a device without a backlog would wait for
            cuda.work(10e-6)

    watch = EventTimer(cuda)
    assert watch.flush.buffer.nbytes == 8000
    read = watch.round([("three", three_launches, 1), ("one", lambda: cuda.work(20e-6), 1)])
    assert read == pytest.approx({"three": 30e-6, "one": 20e-6})
    assert watch.wait_s("three") > 300e-6, "the wait grew until it outlasted the host"
    assert watch.wait_s("one") == MIN_BACKLOG_S, "and the waits of other functions stay as they are"
    assert watch.method("three") == "cuda events, launch gaps hidden"


def test_a_function_that_waits_for_the_device_is_named_so_and_holds_up_no_other():
    cuda = FakeCuda()

    def synchronous():
        cuda.work(10e-6)
        cuda.synchronize()
        cuda.work(10e-6)

    watch = EventTimer(cuda)
    calls = [("synchronous", synchronous, 1), ("plain", lambda: cuda.work(20e-6), 1)]
    watch.round(calls)
    read = watch.round(calls)
    assert read["plain"] == pytest.approx(20e-6) and read["synchronous"] > 20e-6
    assert watch.method("synchronous") == "cuda events, launch gaps included"
    assert watch.method("plain") == "cuda events, launch gaps hidden"
    before = cuda.device_s
    watch.round(calls[:1])
    assert cuda.device_s - before < MAX_BACKLOG_S, "it is no longer put behind a wait"


def test_the_flush_lies_in_front_of_the_clock_and_behind_the_wait():
    cuda = FakeCuda()
    watch = EventTimer(cuda)
    watch.flush = lambda: cuda.work(30e-6, "flush")
    first = len(cuda.log)
    assert watch.round([("a", lambda: cuda.work(10e-6), 2)])["a"] == pytest.approx(20e-6)
    assert [work.name for work in cuda.log[first:]] == ["spin", "flush", "kernel", "kernel"]


def test_the_grid_is_read_from_the_card_also_where_all_samples_are_one():
    for step in [0.5e-6, 1.024e-6]:
        assert EventTimer(FakeCuda(step_s=step)).step_s([9 * step] * 5) == pytest.approx(step)


def test_a_call_shorter_than_ten_steps_is_batched_and_its_cache_is_warm():
    cuda = FakeCuda(step_s=1.024e-6)
    functions = {"short": lambda: cuda.work(3e-6), "long": lambda: cuda.work(50e-6)}
    read = time_functions(functions, min_samples=3, budget_s=1e-9, timer=EventTimer(cuda))
    short, long = read["short"], read["long"]
    assert short.calls_per_sample > 1 and short.l2_state == "warm" and short.resolved
    assert short.median_s == pytest.approx(3e-6, rel=0.1)
    assert short.method == f"cuda events, launch gaps hidden, {short.calls_per_sample} calls per sample"
    assert long.calls_per_sample == 1 and long.l2_state == "cold" and long.resolved


def test_the_launch_floor_is_what_an_empty_kernel_reads():
    cuda = FakeCuda()
    cuda.LAUNCH_S = 2e-6
    watch = EventTimer(cuda)
    assert watch.launch_floor_s(1) == pytest.approx(2e-6) == watch.launch_floor_s(8)

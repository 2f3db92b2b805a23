"""The timers of CUDA events and of graph replay, on a device made of Python."""

from unittest.mock import MagicMock

import pytest
import torch
from fake_cuda import FakeCuda

from rooflab.bench.core import timed
from rooflab.bench.core.settings import Settings
from rooflab.bench.core.timed import time_together
from rooflab.bench.core.timers import cuda as cuda_calls
from rooflab.bench.core.timers.cuda import MAX_BACKLOG_S, MIN_BACKLOG_S, CudaCalls, EventTimer, GraphTimer, NotCaptured
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
    read = watch.rounds([calls, calls])[-1]
    assert read["plain"] == pytest.approx(20e-6) and read["synchronous"] > 20e-6
    assert watch.method("synchronous") == "cuda events, launch gaps included"
    assert watch.method("plain") == "cuda events, launch gaps hidden"
    before = cuda.device_s
    watch.round(calls[:1])
    assert cuda.device_s - before < MAX_BACKLOG_S, "it is no longer put behind a wait"


@pytest.mark.parametrize(("timer", "warm_up"), [(EventTimer, 0), (GraphTimer, 1)])
def test_the_flush_lies_in_front_of_the_clock_and_behind_the_wait(timer, warm_up):
    cuda = FakeCuda()
    watch = timer(cuda)
    watch.flush = lambda: cuda.work(30e-6, "flush")
    first = len(cuda.log)
    assert watch.round([("a", lambda: cuda.work(10e-6), 2)])["a"] == pytest.approx(20e-6)
    assert [work.name for work in cuda.log[first:]] == ["kernel"] * warm_up + ["spin", "flush", "kernel", "kernel"]


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


@pytest.mark.parametrize("timer", [EventTimer, GraphTimer])
def test_the_launch_floor_is_what_an_empty_kernel_reads(timer):
    cuda = FakeCuda()
    cuda.LAUNCH_S = 2e-6
    watch = timer(cuda)
    assert watch.launch_floor_s(1) == pytest.approx(2e-6) == watch.launch_floor_s(8)


class Turns:
    """Takes three sets of inputs in turn, each with a kernel of its own, after 0.3 ms of the host's work."""

    sets = 3

    def __init__(self, cuda):
        self.cuda = cuda
        self.turn = 0

    def __call__(self):
        self.cuda.host_s += 300e-6
        self.cuda.work((10 + self.turn % 3) * 1e-6, f"set {self.turn % 3}")
        self.turn += 1


def test_one_graph_for_each_set_of_inputs_is_replayed_in_turn():
    cuda = FakeCuda()
    watch, function = GraphTimer(cuda), Turns(cuda)
    watch.round([("turns", function, 1)])
    host, first = cuda.host_s, len(cuda.log)
    read = [watch.round([("turns", function, 1)])["turns"] for _ in range(6)]
    replayed = [work.name for work in cuda.log[first:] if work.name.startswith("set")]
    assert cuda.captures == 3, "captured once"
    assert sorted(replayed[:3]) == ["set 0", "set 1", "set 2"] and replayed[:3] == replayed[3:]
    assert sorted(read[:3]) == pytest.approx([10e-6, 11e-6, 12e-6])
    assert cuda.host_s - host < 6 * 300e-6, "the function's host work is not replayed"
    assert watch.method("turns") == "cuda graph replay, launch gaps hidden"


def test_a_function_that_cannot_be_captured_is_refused_by_name_and_takes_no_other_with_it(monkeypatch):
    cuda = FakeCuda()

    def synchronous():
        cuda.work(10e-6)
        cuda.synchronize()

    def fake(functions, **options):
        return time_functions(functions, min_samples=2, budget_s=1e-9, timer=GraphTimer(cuda))

    monkeypatch.setattr(timed, "time_functions", fake)
    read, failures, _ = time_together({"bad": synchronous, "good": lambda: cuda.work(9e-6)}, Settings(budget_s=1e-9))
    assert list(read) == ["good"] and read["good"].median_s == pytest.approx(9e-6)
    assert failures["bad"].status == "UNSUPPORTED" and "bad cannot be captured" in failures["bad"].reason


WAITS = RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with DSA")


@pytest.mark.parametrize(
    ("error", "refused", "reason"),
    [
        (WAITS, NotCaptured, "operation not permitted when stream is capturing$"),
        (None, NotCaptured, "^unjoined work$"),
        (ValueError("a: expected fp32"), ValueError, "a: expected"),
        (torch.cuda.OutOfMemoryError("3 GiB"), torch.cuda.OutOfMemoryError, "3 GiB"),
    ],
)
def test_a_failed_capture_is_ended_and_mended(monkeypatch, error, refused, reason):
    """Also one that torch could not end; the next one, of an empty kernel, can be."""
    fake = MagicMock(capture_end=MagicMock(side_effect=[RuntimeError("unjoined work"), None]), broken=[])
    monkeypatch.setattr(cuda_calls, "Torch", fake)
    monkeypatch.setattr(cuda_calls, "side_stream", lambda index: "side")
    with pytest.raises(refused, match=reason):
        CudaCalls(torch.device("cpu")).capture(MagicMock(side_effect=error), 1)
    fake.in_stream.return_value.__exit__.assert_called_once()
    fake.sleep.assert_called_once_with(0)
    assert fake.capture_end.call_count == fake.capture_begin.call_count == 2 and len(fake.broken) == 1

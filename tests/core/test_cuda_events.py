"""The timers of CUDA events and of graph replay, on a device made of Python."""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeCuda

from rooflab.bench.core import timed
from rooflab.bench.core.settings import Settings
from rooflab.bench.core.timed import time_together
from rooflab.bench.core.timers import cuda as cuda_calls
from rooflab.bench.core.timers.cuda import (
    COARSE_STEP_S,
    MAX_BACKLOG_S,
    MIN_BACKLOG_S,
    REMEMBERED,
    CudaCalls,
    EventTimer,
    GraphTimer,
    NotCaptured,
)
from rooflab.bench.core.timers.timing import time_functions

CPU = torch.device("cpu")


def timer_on(cuda, **options):
    return EventTimer(cuda, **options)


def test_the_launches_are_hidden_behind_a_wait():
    cuda = FakeCuda()

    def three_launches():
        for _ in range(3):
            cuda.host_s += 100e-6  # host work that a device without a backlog would wait for
            cuda.work(10e-6)

    watch = timer_on(cuda)
    assert watch.flush.buffer.nbytes == 8000
    read = watch.round([("three", three_launches, 1), ("one", lambda: cuda.work(20e-6), 1)])
    assert read == pytest.approx({"three": 30e-6, "one": 20e-6})
    assert watch.wait_s("three") > 300e-6, "the wait grew until it outlasted the host"
    assert watch.wait_s("one") == MIN_BACKLOG_S, "and the waits of other functions stay as they are"
    assert watch.method("three") == "cuda events, launch gaps hidden"


def test_a_hiccup_of_the_host_is_forgotten():
    cuda = FakeCuda()
    hiccups = [0.0, 5e-3]

    def stumbles():
        cuda.host_s += hiccups.pop(0) if hiccups else 0.0
        cuda.work(10e-6)

    watch = timer_on(cuda)
    for _ in range(2):
        assert watch.round([("a", stumbles, 1)])["a"] == pytest.approx(10e-6)
    assert watch.wait_s("a") == pytest.approx(10e-3, rel=0.1)
    for _ in range(REMEMBERED):
        watch.round([("a", stumbles, 1)])
    assert watch.wait_s("a") == MIN_BACKLOG_S


def test_a_function_that_waits_for_the_device_is_named_so_and_holds_up_no_other():
    cuda = FakeCuda()

    def synchronous():
        cuda.work(10e-6)
        cuda.synchronize()
        cuda.work(10e-6)

    watch = timer_on(cuda)
    calls = [("synchronous", synchronous, 1), ("plain", lambda: cuda.work(20e-6), 1)]
    for _ in range(2):
        read = watch.round(calls)
    assert read["plain"] == pytest.approx(20e-6) and read["synchronous"] > 20e-6
    assert watch.method("synchronous") == "cuda events, launch gaps included"
    assert watch.method("plain") == "cuda events, launch gaps hidden"
    before = cuda.device_s
    watch.round(calls[:1])
    assert cuda.device_s - before < MAX_BACKLOG_S, "it is no longer put behind a wait"


def test_a_card_that_wakes_up_is_waited_for():
    """A wait counts cycles: where an idle card's clock was taken for its clock, every wait would be too short."""

    class Waking(FakeCuda):
        def sleep(self, cycles):
            hz = 0.345e9 if self.device_s < 0.02 else 1.98e9
            self.work(cycles / hz, "spin")

    cuda = Waking()
    assert timer_on(cuda).cycles_per_s == pytest.approx(1.98e9, rel=0.02)


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
        watch = timer_on(FakeCuda(step_s=step))
        assert watch.step_s([9 * step] * 5) == pytest.approx(step)


def test_a_card_whose_waits_all_read_the_same_is_taken_to_be_coarse():
    cuda = FakeCuda()
    cuda.seconds = lambda start, end: 5e-3
    assert timer_on(cuda).step_s([5e-6]) == COARSE_STEP_S


def test_a_call_shorter_than_ten_steps_is_batched_and_its_cache_is_warm():
    cuda = FakeCuda(step_s=1.024e-6)
    read = time_functions(
        {"short": lambda: cuda.work(3e-6), "long": lambda: cuda.work(50e-6)},
        min_samples=3,
        budget_s=1e-9,
        timer=timer_on(cuda),
    )
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
    taken = len(cuda.log)
    watch.launch_floor_s(1)
    assert len(cuda.log) == taken, "read once"


def test_observers_look_once_a_round_while_the_device_works():
    cuda = FakeCuda()
    seen = []
    watch = timer_on(cuda)
    slow = [1e-3]

    def late_once():
        cuda.host_s += slow.pop(0) if slow else 0.0
        cuda.work(10e-6)

    calls = [("late", late_once, 1), ("b", lambda: cuda.work(20e-6), 1)]
    watch.round(calls, lambda: seen.append(cuda.device_s > cuda.host_s))
    assert seen == [True], "once, although one sample was taken again"


@pytest.mark.parametrize("timer", [EventTimer, GraphTimer])
def test_nobody_looks_at_a_warm_up_or_at_empty_kernels(timer):
    """A clock read there is that of a card without load, and there are more of those than of samples."""
    cuda, seen = FakeCuda(), []
    options = {"min_samples": 3, "budget_s": 1e-9, "timer": timer(cuda)}
    options["observe"] = lambda: seen.append(cuda.log[-1].name)
    read = time_functions({"a": lambda: cuda.work(50e-6)}, **options)["a"]
    assert read.launch_floor_s is not None and seen == ["kernel"] * len(read.seconds)


def test_a_flush_by_writing_is_named():
    assert timer_on(FakeCuda(), flush="write").method("a").endswith("hidden, flushed by writing")


def graphs(cuda, **options):
    return GraphTimer(cuda, **options)


class Turns:
    """Takes three sets of inputs in turn, each with a kernel of its own."""

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
    watch = graphs(cuda)
    function = Turns(cuda)
    watch.round([("turns", function, 1)])
    assert cuda.captures == 3
    host = cuda.host_s
    first = len(cuda.log)
    read = [watch.round([("turns", function, 1)])["turns"] for _ in range(6)]
    replayed = [work.name for work in cuda.log[first:] if work.name.startswith("set")]
    assert cuda.captures == 3, "captured once"
    assert sorted(replayed[:3]) == ["set 0", "set 1", "set 2"] and replayed[:3] == replayed[3:]
    assert sorted(read[:3]) == pytest.approx([10e-6, 11e-6, 12e-6])
    assert cuda.host_s - host < 6 * 300e-6, "the function's host work is not replayed"
    assert watch.method("turns") == "cuda graph replay, launch gaps hidden"


def test_short_calls_share_one_graph():
    cuda = FakeCuda(step_s=1e-6)
    options = {"min_samples": 3, "budget_s": 1e-9, "timer": graphs(cuda)}
    read = time_functions({"short": lambda: cuda.work(2e-6)}, **options)["short"]
    assert read.calls_per_sample == 10 and read.l2_state == "warm"
    assert read.median_s == pytest.approx(2e-6)


def test_a_function_that_cannot_be_captured_is_refused_by_name_and_takes_no_other_with_it(monkeypatch):
    cuda = FakeCuda()

    def synchronous():
        cuda.work(10e-6)
        cuda.synchronize()

    def fake(functions, **options):
        return time_functions(functions, min_samples=2, budget_s=1e-9, timer=graphs(cuda))

    with pytest.raises(ValueError, match="UNSUPPORTED: bad cannot be captured in a CUDA graph .*; time it with events"):
        fake({"bad": synchronous})
    monkeypatch.setattr(timed, "time_functions", fake)
    read, failures, _ = time_together({"bad": synchronous, "good": lambda: cuda.work(9e-6)}, Settings(budget_s=1e-9))
    assert list(read) == ["good"] and read["good"].median_s == pytest.approx(9e-6)
    assert failures["bad"].status == "UNSUPPORTED" and "stream is capturing" in failures["bad"].reason


@pytest.fixture
def torch_cuda(monkeypatch):
    """The functions that `CudaCalls` holds, as a log of their names; an empty capture warns as torch's does."""
    log = SimpleNamespace(calls=[], end=lambda: None, stream="mine", pools=[], allocating=set(), held=set(), streams=0)

    @contextlib.contextmanager
    def in_stream(stream):
        before, log.stream = log.stream, "side"
        try:
            yield
        finally:
            log.stream = before

    def note(name):
        return lambda *args, **kwargs: log.calls.append(name)

    def new_stream(device):
        log.streams += 1
        return "side"

    def new_pool():
        log.pools.append((0, len(log.pools) + 1))
        return log.pools[-1]

    def begin(graph, pool, capture_error_mode):
        log.calls.append("begin")
        graph.pool = pool
        log.allocating.add(pool)
        log.held.add(pool)

    def end(graph):
        """As torch: what cannot be ended goes on allocating from the graph's pool, and holds it."""
        log.calls.append("end")
        log.end()
        end_allocations(0, graph.pool)
        log.held.discard(graph.pool)  # by the graph, from here on

    def end_allocations(index, pool):
        if pool not in log.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        log.allocating.remove(pool)

    fakes = {
        "Graph": lambda: SimpleNamespace(reset=note("reset")),
        "Stream": new_stream,
        "in_stream": in_stream,
        "synchronize": note("synchronize"),
        "sleep": note("sleep"),
        "current_device": lambda: 0,
        "new_pool": new_pool,
        "capture_begin": begin,
        "capture_end": end,
        "end_allocations": end_allocations,
        "release_pool": lambda index, pool: log.held.remove(pool),
        "replay": note("replay"),
        "broken": [],
    }
    monkeypatch.setattr(cuda_calls, "Torch", SimpleNamespace(**fakes))
    cuda_calls.side_stream.cache_clear()
    yield log
    cuda_calls.side_stream.cache_clear()


def test_a_capture_is_made_on_another_stream_and_replayed(torch_cuda):
    streams = []
    replay = CudaCalls(CPU).capture(lambda: streams.append(torch_cuda.stream), 2)
    assert streams == ["side", "side"] and torch_cuda.stream == "mine"
    assert torch_cuda.calls == ["synchronize", "begin", "end", "synchronize"]
    replay()
    assert torch_cuda.calls[-1] == "replay"


def raises(error):
    def function():
        raise error

    return function


def test_a_failed_capture_is_ended_and_the_stream_is_as_before(torch_cuda):
    sync = RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with DSA")
    for function, reason in ((raises(sync), "operation not permitted when stream is capturing$"), (list, "unjoined")):
        ends = iter([raises(RuntimeError("unjoined work"))])
        torch_cuda.end = lambda ends=ends: next(ends, list)()
        torch_cuda.calls.clear()
        with pytest.raises(NotCaptured, match=reason):
            CudaCalls(CPU).capture(function, 1)
        assert torch_cuda.stream == "mine" and torch_cuda.calls[-1] == "reset" and "end" in torch_cuda.calls


@pytest.mark.parametrize("after", [False, True], ids=["before the pool is left", "after it"])
@pytest.mark.parametrize("error", [RuntimeError("unjoined work"), ValueError("x: expected fp32"), None])
def test_a_capture_that_cannot_be_ended_leaves_torch_as_it_was(torch_cuda, monkeypatch, error, after):
    """No pool is allocated from, and a capture of an empty kernel ends well, which sets the generator free."""
    real, failing = cuda_calls.Torch.capture_end, iter([True])

    def end(graph):
        if after:
            real(graph)
        if next(failing, False):
            torch_cuda.calls.append("end fails")
            raise RuntimeError("operation failed due to a previous error during capture")
        if not after:
            real(graph)

    monkeypatch.setattr(cuda_calls.Torch, "capture_end", end)
    with pytest.raises(ValueError if isinstance(error, ValueError) else NotCaptured):
        CudaCalls(CPU).capture(raises(error) if error else list, 1)
    assert not torch_cuda.allocating and not torch_cuda.held and torch_cuda.stream == "mine"
    later = torch_cuda.calls[torch_cuda.calls.index("end fails") :]
    assert later[1:5] == ["reset", "begin", "sleep", "end"] and len(set(torch_cuda.pools)) == 2
    assert len(cuda_calls.Torch.broken) == 1, "what torch goes on asking is not freed"


def test_a_device_that_is_lost_is_not_mended_and_the_reason_is_the_first(torch_cuda):
    torch_cuda.end = raises(RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(NotCaptured, match="launch failed"):
        CudaCalls(CPU).capture(raises(RuntimeError("launch failed")), 1)


def test_all_share_one_stream_of_a_device(torch_cuda):
    for _ in range(2):
        CudaCalls(CPU).capture(lambda: None, 1)
        CudaCalls(torch.device("cuda", 0)).warm_up(lambda: None)
    assert torch_cuda.streams == 1 and cuda_calls.side_stream.cache_info().currsize == 1
    CudaCalls(torch.device("cuda", 1)).warm_up(lambda: None)
    assert torch_cuda.streams == 2


def test_what_is_no_matter_of_the_capture_comes_through(torch_cuda):
    for error in (ValueError("a: expected fp32"), torch.cuda.OutOfMemoryError("3 GiB")):
        torch_cuda.calls.clear()
        with pytest.raises(type(error)):
            CudaCalls(CPU).capture(raises(error), 1)
        assert "end" in torch_cuda.calls


def test_a_function_that_works_elsewhere_leaves_an_empty_graph_and_is_refused(torch_cuda):
    torch_cuda.end = lambda: warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)
    with pytest.raises(NotCaptured, match="enqueued nothing on the current stream"):
        CudaCalls(CPU).capture(lambda: None, 1)

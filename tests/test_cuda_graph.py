import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeCuda

from rooflab.bench import cuda_calls, timed
from rooflab.bench.cuda_calls import CudaCalls, NotCaptured
from rooflab.bench.cuda_graph import GraphStopwatch
from rooflab.bench.timed import time_together
from rooflab.bench.timing import time_functions

CPU = torch.device("cpu")


def stopwatch(cuda, **options):
    return GraphStopwatch(CPU, cuda=cuda, clock=cuda.clock, **options)


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
    watch = stopwatch(cuda)
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
    assert watch.method("turns", 1) == "cuda graph replay, launch gaps hidden"


def test_the_cache_is_emptied_in_front_of_every_replay_and_outside_its_time():
    cuda = FakeCuda()
    watch = stopwatch(cuda)
    watch.flush = lambda: cuda.work(30e-6, "flush")
    assert watch.round([("a", lambda: cuda.work(10e-6), 1)])["a"] == pytest.approx(10e-6)
    assert [work.name for work in cuda.log[-2:]] == ["flush", "kernel"]


def test_short_calls_share_one_graph():
    cuda = FakeCuda(step_s=1e-6)
    read = time_functions({"short": lambda: cuda.work(2e-6)}, min_samples=3, budget_s=1e-9, stopwatch=stopwatch(cuda))[
        "short"
    ]
    assert read.calls_per_sample == 10 and read.l2_state == "warm"
    assert read.median_s == pytest.approx(2e-6)


def test_the_launch_floor_is_that_of_a_graph():
    cuda = FakeCuda()
    cuda.LAUNCH_S = 1.3e-6
    assert stopwatch(cuda).launch_floor_s(1) == pytest.approx(1.3e-6) and cuda.captures == 1


def test_a_function_that_cannot_be_captured_is_refused_by_name_and_takes_no_other_with_it(monkeypatch):
    cuda = FakeCuda()

    def synchronous():
        cuda.work(10e-6)
        cuda.synchronize()

    def fake(functions, **options):
        return time_functions(functions, min_samples=2, budget_s=1e-9, stopwatch=stopwatch(cuda))

    with pytest.raises(ValueError, match="UNSUPPORTED: bad cannot be captured in a CUDA graph .*; time it with events"):
        fake({"bad": synchronous})
    monkeypatch.setattr(timed, "time_functions", fake)
    read, failures, _ = time_together({"bad": synchronous, "good": lambda: cuda.work(9e-6)}, CPU, 1e-9, 0, None)
    assert list(read) == ["good"] and read["good"].median_s == pytest.approx(9e-6)
    assert failures["bad"].status == "UNSUPPORTED" and "stream is capturing" in failures["bad"].reason


@pytest.fixture
def torch_cuda(monkeypatch):
    """The functions that `CudaCalls` holds, as a log of their names; an empty capture warns as torch's does."""
    log = SimpleNamespace(calls=[], end=lambda: None, stream="mine")

    @contextlib.contextmanager
    def in_stream(stream):
        before, log.stream = log.stream, "side"
        yield
        log.stream = before

    def note(name):
        return lambda *args, **kwargs: log.calls.append(name)

    def end(graph):
        log.calls.append("end")
        log.end()

    monkeypatch.setattr(cuda_calls, "_Graph", lambda: SimpleNamespace(reset=note("reset")))
    monkeypatch.setattr(cuda_calls, "_Stream", lambda device: "side")
    monkeypatch.setattr(cuda_calls, "_in_stream", in_stream)
    monkeypatch.setattr(cuda_calls, "_synchronize", note("synchronize"))
    monkeypatch.setattr(cuda_calls, "_capture_begin", note("begin"))
    monkeypatch.setattr(cuda_calls, "_capture_end", end)
    monkeypatch.setattr(cuda_calls, "_replay", note("replay"))
    return log


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
    unjoined = raises(RuntimeError("unjoined work"))
    torch_cuda.end = unjoined
    sync = RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with DSA")
    for function, reason in ((raises(sync), "operation not permitted when stream is capturing$"), (list, "unjoined")):
        torch_cuda.calls.clear()
        with pytest.raises(NotCaptured, match=reason):
            CudaCalls(CPU).capture(function, 1)
        assert torch_cuda.stream == "mine" and torch_cuda.calls[-1] == "reset" and "end" in torch_cuda.calls


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

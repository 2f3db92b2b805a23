import time

import pytest
import torch

from rooflab.bench.timing import tamper
from rooflab.bench.timing.tamper import tampered


def test_untouched_clocks_are_untouched():
    assert tampered() is None
    assert {"time.perf_counter", "torch.cuda.Event.elapsed_time", "torch.cuda.synchronize"} <= set(tamper._WATCHED)


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [
        (time, "perf_counter", "time.perf_counter"),
        (torch.cuda, "Event", "torch.cuda.Event"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (torch.cuda.Event, "record", "torch.cuda.Event.record"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda, "current_stream", "torch.cuda.current_stream"),
        (torch.cuda.CUDAGraph, "replay", "torch.cuda.CUDAGraph.replay"),
        (torch.autograd.profiler, "profile", "torch.autograd.profiler.profile"),
        (torch, "sum", "torch.sum"),
    ],
)
def test_what_was_replaced_is_named(monkeypatch, owner, attribute, name):
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, lambda *arguments: 0.0)
        assert name in tampered() and tampered().endswith("replaced while the bench ran")
    assert tampered() is None


def test_code_exchanged_inside_a_function_is_seen():
    function = torch.cuda.synchronize
    code = function.__code__

    def nothing(device=None):
        return None

    try:
        function.__code__ = nothing.__code__
        assert tampered() == "torch.cuda.synchronize replaced while the bench ran"
    finally:
        function.__code__ = code
    assert tampered() is None


def test_what_is_gone_is_replaced(monkeypatch):
    monkeypatch.delattr(time, "perf_counter_ns")
    assert "time.perf_counter_ns" in tampered()


def test_what_was_replaced_before_the_bench_was_imported_is_seen(monkeypatch):
    def elapsed_time(self, end):
        return 0.0

    for owner, attribute, forged in ((torch.cuda.Event, "elapsed_time", elapsed_time), (time, "perf_counter", sum)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, forged)
            patch.setattr(tamper, "_WATCHED", {"it": tamper._hold(owner, attribute)})
            assert tampered() == "it replaced before the bench was imported"
    assert tampered() is None

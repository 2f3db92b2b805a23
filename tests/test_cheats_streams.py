"""The rule of streams and of L2: what a check on a GPU sees, on a GPU and on a CPU that stands for one."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import cheating_kernels as cheating
import pytest
import tiny_ops as tiny
import torch

from rooflab.bench.check import cheats
from rooflab.bench.check import streams as check_streams
from rooflab.bench.check.check import CheckResult, check_kernel
from rooflab.bench.check.poison import guard
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import get_scheme


def check(kernel: Kernel, device: str = "cpu") -> CheckResult:
    return check_kernel(kernel, tiny.PROJECT, tiny.PROJECT.cases["smoke"][0], get_scheme("fp32"), device)


# Streams: on a CPU by a queue that runs when it is waited for.


@pytest.fixture
def side_stream(monkeypatch):
    queued = []

    def run(device):
        while queued:
            queued.pop(0)()

    monkeypatch.setattr(check_streams, "wait_for_all", run)
    monkeypatch.setattr(check_streams, "several", lambda device: True)
    return queued


def test_work_on_a_stream_that_is_not_waited_for_is_named(side_stream):
    def other_stream(x, weight):
        y = torch.full((x.shape[0], weight.shape[1]), torch.nan)
        side_stream.append(lambda: y.copy_(cheating.project(x, weight)))
        return y

    result = check(tiny.kernel(tiny.PROJECT, other_stream))
    assert result.status == "INCORRECT" and "first data: y: 35 of 35" in result.reason
    assert "work on another stream: it is right only where the whole device is waited for" in result.reason


def test_what_is_wrong_on_every_stream_is_not_laid_on_streams(side_stream):
    def wrong(x, weight):
        return cheating.project(x, weight) * 1.01

    result = check(tiny.kernel(tiny.PROJECT, wrong))
    assert result.status == "INCORRECT" and "stream" not in result.reason


def test_a_call_is_queued_behind_a_pause_and_then_its_inputs(monkeypatch):
    x, table = guard(torch.ones(2, 3)), guard(torch.arange(4))
    seen = []

    def note(*arguments):
        seen.append((bool(x.view.isnan().all()), bool(x.view.eq(1).all()), table.view.tolist(), arguments))

    fake = SimpleNamespace(device=lambda device: contextlib.nullcontext(), synchronize=note, _sleep=note)
    monkeypatch.setattr(check_streams, "_cuda", fake)
    cuda = torch.device("cuda", 0)
    with check_streams.queued(cuda, [x, table], alone=False):
        note("call")
    idle, pause, call = seen
    assert idle == (False, True, [0, 1, 2, 3], (cuda,))
    assert pause == (True, False, [0, 1, 2, 3], (check_streams.PAUSE_CYCLES,)), "NaN, and no index is touched"
    assert call == (False, True, [0, 1, 2, 3], ("call",)) and x.damage(may_change=False) is None
    seen.clear()
    with check_streams.queued(cuda, [x, table], alone=True):
        note("call")
    assert [arguments for *_, arguments in seen] == [(cuda,), ("call",)]


def _on_side_stream(x, weight, waits_before, waits_after):
    y = torch.full((x.shape[0], weight.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    own, side = torch.cuda.current_stream(), torch.cuda.Stream()
    if waits_before:
        side.wait_stream(own)
    with torch.cuda.stream(side):
        if waits_before:
            torch.cuda._sleep(2_000_000)
        y.copy_(cheating.project(x, weight))
    if waits_after:
        own.wait_stream(side)
    return y


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("waits_before", "waits_after"), [(True, False), (False, True), (False, False), (True, True)], ids=str
)
def test_on_a_gpu_another_stream_is_named_unless_both_wait(waits_before, waits_after):
    def side_stream(x, weight):
        return _on_side_stream(x, weight, waits_before, waits_after)

    result = check(tiny.kernel(tiny.PROJECT, side_stream), "cuda")
    if waits_before and waits_after:
        assert result.status == "OK", result.describe()
    else:
        assert result.status == "INCORRECT" and "work on another stream" in result.reason, result.describe()


@pytest.mark.gpu
def test_on_a_gpu_an_answer_for_each_content_is_caught_by_the_devices_kernels():
    answers = {}

    def memo(x, weight):
        key = (x.cpu().numpy().tobytes(), weight.cpu().numpy().tobytes())
        if key not in answers:
            answers[key] = cheating.project(x, weight)
        return answers[key].clone()

    result = check(tiny.kernel(tiny.PROJECT, memo), "cuda")
    assert result.status == "INCORRECT" and "a cached answer: on data that it has seen" in result.reason


# L2 that outlives a flush.


class Driver:
    """Stands for libcuda."""

    def __init__(self, size, fails=0):
        self.size, self.fails, self.calls = size, fails, []

    def cuCtxGetLimit(self, pointer, limit):
        assert limit == 6, "CU_LIMIT_PERSISTING_L2_CACHE_SIZE"
        pointer._obj.value = self.size
        return self.fails

    def cuCtxResetPersistingL2Cache(self):
        self.calls.append("reset")

    def cuCtxSetLimit(self, limit, size):
        self.calls.append((limit, size.value))


def test_l2_that_was_set_aside_is_seen_and_given_back():
    assert cheats.persisting_l2_bytes(Driver(4096)) == 4096 and cheats.persisting_l2_bytes(Driver(0)) == 0
    assert cheats.persisting_l2_bytes(Driver(4096, fails=1)) == 0, "a driver that does not know the limit"
    driver = Driver(4096)
    cheats.give_back_l2(driver)
    assert driver.calls == ["reset", (6, 0)]


@pytest.mark.gpu
def test_on_a_gpu_l2_persistence_is_named():
    def persists(x, weight):
        ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(2**20))
        return cheating.project(x, weight)

    result = check(tiny.kernel(tiny.PROJECT, persists), "cuda")
    assert result.status == "INVALID" and "L2 persistence: " in result.reason
    assert cheats.persisting_l2_bytes() == 0

"""The signs of a cheat: shared and unwritten memory, replaced functions, values that a timing renews, other streams."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from zoo import cheats
from zoo.tiny_ops import PROJECT, kernel_of

from rooflab.bench.core import poison, trial, why
from rooflab.bench.core.call import Rotation
from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.core.timed import Unseen
from rooflab.bench.core.timers import tampered
from rooflab.bench.core.timers.timing import time_functions
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, get_scheme

FP32 = get_scheme("fp32")
CASE = Case(T=5, K=96, N=7)


def check(kernel: Kernel, spec: OpSpec = PROJECT, device: str = "cpu") -> CheckResult:
    return check_kernel(kernel, spec, spec.cases["smoke"][0], FP32, device)


# Functions under the bench replaced.


def test_a_function_replaced_at_import_fails_a_check_and_is_put_back(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    honest = kernel_of(PROJECT, lambda x, weight: cheats.project(x, weight))
    result = check(honest)
    assert result.status == "INVALID" and "time.perf_counter was replaced (test_cheats.py:" in result.reason
    assert check(honest).status == "OK"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.cuda, "Event"),
        (torch.cuda, "synchronize"),
        (torch.cuda.Event, "elapsed_time"),
        (torch.cuda.CUDAGraph, "replay"),
        (torch.nn.functional, "rms_norm"),
        (np, "median"),
    ],
)
def test_a_function_under_the_timer_that_was_replaced_is_named_and_put_back(owner, name):
    was = getattr(owner, name)
    setattr(owner, name, lambda *arguments: 0.0)
    assert f".{name} was replaced (test_cheats.py:" in tampered()
    assert tampered() is None and getattr(owner, name) is was


def test_torchs_own_replacements_are_no_tampering():
    import torch._dynamo  # replaces torch.manual_seed

    assert torch._dynamo and tampered() is None


# Right while it is checked.


def _wrong_when_timed(spec=PROJECT, **functions):
    """What is wrong with kernels after a timing in which their inputs got values that they had not seen."""
    copies = [spec.make_inputs(CASE, FP32, torch.device("cpu"), 0) for _ in range(2)]
    kernels = {name: fn if isinstance(fn, Kernel) else kernel_of(spec, fn) for name, fn in functions.items()}
    rotations = {name: Rotation(kernel, spec, copies) for name, kernel in kernels.items()}
    unseen = Unseen(spec, CASE, FP32, torch.device("cpu"), copies, 0)
    time_functions(rotations, budget_s=1e-6, min_samples=9, cold=False, renew=unseen)
    return unseen.wrong(rotations)


def test_what_is_wrong_only_when_it_is_timed_is_caught_then():
    def damages(x, weight):
        y = cheats.project(x, weight)
        x.zero_()
        return y

    wrong = {make.__name__: make() for make in cheats.WRONG_WHEN_TIMED}
    packed = kernel_of(PROJECT, lambda x, weight: x @ weight[0], prepare=lambda weight: (weight.clone(),))
    found = _wrong_when_timed(**wrong, honest=cheats.project, packed=packed)
    assert found.keys() == wrong.keys(), "a packed weight stays"
    assert all(fault.startswith("y: ") for fault in found.values())
    assert _wrong_when_timed(damages=damages)["damages"].endswith("an input was changed while it was timed")


# Streams: on a CPU by a queue that runs when it is waited for.


@pytest.fixture
def side_stream(monkeypatch):
    queued = []

    def run(device):
        while queued:
            queued.pop(0)()

    monkeypatch.setattr(trial, "wait_for_all", run)
    monkeypatch.setattr(why, "several", lambda device: True)
    return queued


def test_work_on_a_stream_that_is_not_waited_for_is_named(side_stream):
    def other_stream(x, weight):
        y = torch.full((x.shape[0], weight.shape[1]), torch.nan)
        side_stream.append(lambda: y.copy_(cheats.project(x, weight)))
        return y

    result = check(kernel_of(PROJECT, other_stream))
    assert result.status == "INCORRECT" and "first data: y: 35 of 35" in result.reason
    assert "work on another stream: it is right only if the caller waits for the whole device" in result.reason


def _on_side_stream(x, weight, waits_before, waits_after):
    y = torch.full((x.shape[0], weight.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    own, side = torch.cuda.current_stream(), torch.cuda.Stream()
    if waits_before:
        side.wait_stream(own)
    with torch.cuda.stream(side):
        if waits_before:
            torch.cuda._sleep(2_000_000)
        y.copy_(cheats.project(x, weight))
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

    result = check(kernel_of(PROJECT, side_stream), device="cuda")
    if waits_before and waits_after:
        assert result.status == "OK", result.describe()
    else:
        assert result.status == "INCORRECT" and "work on another stream" in result.reason, result.describe()


def test_what_lies_in_memory_is_known_whatever_object_holds_it():
    buffer = torch.arange(12.0)
    for output in (buffer[3:5], buffer.view(3, 4).mT, torch.from_numpy(buffer.numpy()[11:]), buffer.view(torch.int32)):
        assert poison.aliases(output, buffer)
    assert not poison.aliases(buffer.clone(), buffer) and not poison.aliases(buffer[:0], buffer)
    nan = torch.full((3,), torch.nan)
    for fresh in (nan, torch.full((3,), 2**31 - 1, dtype=torch.int32)):
        assert poison.never_written((fresh,))
    half, whole = torch.tensor([torch.nan, 1.0]), torch.arange(3, dtype=torch.int32)
    for written in ((nan, torch.ones(3)), (half,), (whole,), (torch.tensor([True]),), (torch.ones(0),), ()):
        assert not poison.never_written(written)
    outputs = torch.zeros(2), torch.zeros(2)
    read = tuple(output.clone() for output in outputs)
    outputs[1].fill_(1)
    assert "a thread that finishes later" in str(poison.changes_later(outputs, read))

"""Cheating kernels are each caught and named, and honest ones that keep something between calls are not accused."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import cheating_kernels as cheating
import pytest
import tiny_ops as tiny
import torch
from cheating_kernels import HONEST

from rooflab.bench.calls.calls import Rotation
from rooflab.bench.check import cheats, runs, trial
from rooflab.bench.check.check import CheckResult, check_kernel
from rooflab.bench.check.poison import guard
from rooflab.bench.measure.unseen import Unseen
from rooflab.bench.timing import tamper
from rooflab.bench.timing.timing import time_functions
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, get_scheme

FP32 = get_scheme("fp32")
CASE = Case(T=5, K=96, N=7)


def check(kernel: Kernel, spec: OpSpec = tiny.PROJECT, device: str = "cpu") -> CheckResult:
    return check_kernel(kernel, spec, spec.cases["smoke"][0], FP32, device)


@pytest.mark.parametrize(
    ("make", "spec", "status", "words"), cheating.CHEATS, ids=[make().name for make, *_ in cheating.CHEATS]
)
def test_a_cheat_is_caught_and_named(make, spec, status, words):
    result = check(make(), spec)
    assert result.status == status, result.describe()
    assert all(word in result.reason for word in words), result.reason
    assert tamper.tampered() is None, "what one kernel replaced is not laid on the next"


@pytest.mark.parametrize("name", HONEST)
def test_what_an_honest_kernel_keeps_is_no_cheat(name):
    kernel = HONEST[name]()
    for _ in range(2):
        result = check(kernel)
        assert result.status == "OK", result.describe()


def test_work_is_compared_where_a_path_differs_and_absolves():
    assert "new data, twice each" in check(HONEST["takes_another_path_into_out"]()).labels
    once = check(HONEST["compiles_once"]())
    assert "new data, twice each" not in once.labels, "what only the first call does is no hint"


def test_a_plan_that_is_kept_for_the_same_lengths_or_slots_is_no_answer():
    plans = {}

    def planned(k, v, k_cache, v_cache, slot_mapping):
        key = slot_mapping.numpy().tobytes()
        if key not in plans:
            plans[key] = slot_mapping.argsort()
        kept = plans[key][slot_mapping[plans[key]] >= 0]
        for new, cache in ((k, k_cache), (v, v_cache)):
            slots = slot_mapping[kept]
            cache[slots // cache.shape[1], slots % cache.shape[1]] = new[kept]

    result = check(tiny.kernel(tiny.STORE, planned), tiny.STORE)
    assert result.status == "OK", result.describe()
    assert "new data, twice each" in result.labels and len(plans) > 1


def test_memory_is_shared_whatever_object_holds_it():
    buffer = torch.arange(12.0)
    for output in (buffer[3:5], buffer.view(3, 4).mT, torch.from_numpy(buffer.numpy()[11:]), buffer.view(torch.int32)):
        assert cheats.aliases(output, buffer)
    assert not cheats.aliases(buffer.clone(), buffer) and not cheats.aliases(buffer[:0], buffer)


def test_only_fresh_memory_counts_as_never_written():
    nan = torch.full((3,), torch.nan)
    assert cheats.never_written((nan,)) and cheats.never_written((torch.full((3,), 2**31 - 1, dtype=torch.int32),))
    assert cheats.never_written((torch.full((12,), cheats.SENTINEL_BYTE, dtype=torch.uint8).view(torch.int32),))
    half, whole = torch.tensor([torch.nan, 1.0]), torch.arange(3, dtype=torch.int32)
    for written in ((nan, torch.ones(3)), (half,), (whole,), (torch.tensor([True]),), (torch.ones(0),), ()):
        assert not cheats.never_written(written)


# Tools replaced before the check, and before the bench.


def test_a_tool_replaced_at_import_fails_every_check_until_it_is_back(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    result = check(tiny.kernel(tiny.PROJECT, lambda x, weight: cheating.project(x, weight)))
    assert result.status == "INVALID" and "before the check began" in result.reason
    assert "a patched timer: time.perf_counter was replaced (test_cheats.py:" in result.reason
    monkeypatch.undo()
    assert check(tiny.kernel(tiny.PROJECT, lambda x, weight: cheating.project(x, weight))).status == "OK"


@pytest.mark.parametrize(
    ("place", "name", "words"),
    [
        (time, "perf_counter", "a patched timer: time.perf_counter"),
        (torch, "equal", "a patched comparison: torch.equal"),
    ],
)
def test_a_tool_replaced_before_the_bench_was_imported_is_known_by_where_it_was_written(
    monkeypatch, place, name, words
):
    monkeypatch.setattr(place, name, lambda *a: True)
    spec = importlib.util.spec_from_file_location("imported_late", tamper.__file__)
    late = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "imported_late", late)
    spec.loader.exec_module(late)
    monkeypatch.undo()
    assert str(late.tampered()).startswith(f"{words} was replaced before the bench was imported")


class Equal:
    """Says that it is whatever it stands for."""

    def __call__(self, *arguments):
        return True

    def __eq__(self, other):
        return True

    __hash__ = None


def test_a_replacement_that_equals_the_original_and_one_that_is_gone_are_seen(monkeypatch):
    monkeypatch.setattr(torch, "equal", Equal())
    assert str(tamper.tampered()).startswith("a patched comparison: torch.equal was replaced")
    monkeypatch.undo()
    monkeypatch.delattr(torch, "isfinite")
    assert str(tamper.tampered()).startswith("a patched comparison: torch.isfinite was replaced")
    tamper.restore()
    assert tamper.tampered() is None and torch.isfinite(torch.ones(1)).all()


def test_torchs_own_replacements_are_no_tampering():
    import torch._dynamo  # replaces torch.manual_seed

    assert torch._dynamo and tamper.tampered() is None


# Right while it is checked.


def _turns_after(calls):
    """A kernel that is right for as many calls, and then returns its last answer."""
    made = []

    def kernel(x, weight):
        made.append(cheating.project(x, weight) if len(made) < calls else made[-1])
        return made[-1].clone()

    return tiny.kernel(tiny.PROJECT, kernel)


def _wrong_when_timed(spec=tiny.PROJECT, **functions):
    """What is wrong with kernels after a timing in which their inputs got values that they had not seen."""
    copies = [spec.make_inputs(CASE, FP32, torch.device("cpu"), 0) for _ in range(2)]
    kernels = {name: fn if isinstance(fn, Kernel) else tiny.kernel(spec, fn) for name, fn in functions.items()}
    rotations = {name: Rotation(kernel, spec, copies) for name, kernel in kernels.items()}
    unseen = Unseen(spec, CASE, FP32, torch.device("cpu"), copies, 0)
    time_functions(rotations, budget_s=1e-6, min_samples=9, cold=False, renew=unseen)
    return unseen.wrong(rotations)


def test_an_answer_kept_once_the_check_is_over_is_caught_when_it_is_timed():
    packed = tiny.kernel(tiny.PROJECT, lambda x, weight: x @ weight[0], prepare=lambda weight: (weight.clone(),))
    found = _wrong_when_timed(cached=_turns_after(3), honest=cheating.project, packed=packed)
    assert list(found) == ["cached"], "a packed weight stays"
    assert found["cached"].startswith("y: ")


def test_each_timed_round_has_values_that_no_round_had():
    copies = [tiny.PROJECT.make_inputs(CASE, FP32, torch.device("cpu"), 0) for _ in range(2)]
    unseen = Unseen(tiny.PROJECT, CASE, FP32, torch.device("cpu"), copies, 0)
    seen = {(unseen(), copies[1]["x"].numpy().tobytes()) for _ in range(20)}
    assert len(seen) > 15, "few of 480 places and shifts come twice"


def test_a_kernel_that_changes_its_inputs_while_it_is_timed_is_blamed_for_it():
    def damages(x, weight):
        y = cheating.project(x, weight)
        x.zero_()
        return y

    assert _wrong_when_timed(damages=damages)["damages"].endswith("an input was changed while it was timed")


def test_inputs_whose_shapes_depend_on_the_seed_stay_as_they_are():
    def ragged(case, scheme, device, seed):
        return tiny.PROJECT.make_inputs(case.but(T=5 + seed % 7), scheme, device, seed)

    assert _wrong_when_timed(replace(tiny.PROJECT, make_inputs=ragged), honest=cheating.project) == {}


# Streams: on a CPU by a queue that runs when it is waited for.


@pytest.fixture
def side_stream(monkeypatch):
    queued = []

    def run(device):
        while queued:
            queued.pop(0)()

    monkeypatch.setattr(trial, "wait_for_all", run)
    monkeypatch.setattr(runs, "several", lambda device: True)
    return queued


def test_work_on_a_stream_that_is_not_waited_for_is_named(side_stream):
    def other_stream(x, weight):
        y = torch.full((x.shape[0], weight.shape[1]), torch.nan)
        side_stream.append(lambda: y.copy_(cheating.project(x, weight)))
        return y

    result = check(tiny.kernel(tiny.PROJECT, other_stream))
    assert result.status == "INCORRECT" and "first data: y: 35 of 35" in result.reason
    assert "work on another stream: it is right only if the caller waits for the whole device" in result.reason


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
    monkeypatch.setattr(trial, "_cuda", fake)
    cuda = torch.device("cuda", 0)
    with trial.queued(cuda, [x, table], alone=False):
        note("call")
    idle, pause, call = seen
    assert idle == (False, True, [0, 1, 2, 3], (cuda,))
    assert pause == (True, False, [0, 1, 2, 3], (trial.PAUSE_CYCLES,)), "NaN, and no index is touched"
    assert call == (False, True, [0, 1, 2, 3], ("call",)) and x.damage(may_change=False) is None
    seen.clear()
    with trial.queued(cuda, [x, table], alone=True):
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

    result = check(tiny.kernel(tiny.PROJECT, side_stream), device="cuda")
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

    result = check(tiny.kernel(tiny.PROJECT, memo), device="cuda")
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
    cheats.give_back_l2(1024, driver)
    assert driver.calls == ["reset", (6, 1024)]


@pytest.mark.gpu
def test_on_a_gpu_l2_persistence_is_named():
    def persists(x, weight):
        ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(2**20))
        return cheating.project(x, weight)

    result = check(tiny.kernel(tiny.PROJECT, persists), device="cuda")
    assert result.status == "INVALID" and "L2 persistence: " in result.reason
    assert cheats.persisting_l2_bytes() == 0
    ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(2**20))  # by another program, before the check
    assert check(tiny.kernel(tiny.PROJECT, cheating.project), device="cuda").status == "OK"
    cheats.give_back_l2()


CLOCKS = [
    (time, "time", ("perf_counter", "perf_counter_ns")),
    (torch.cuda, "torch.cuda", ("Event", "synchronize", "current_stream")),
    (torch.cuda.Event, "torch.cuda.Event", ("elapsed_time", "record")),
    (torch.cuda.CUDAGraph, "torch.cuda.CUDAGraph", ("replay",)),
    (torch.autograd.profiler, "torch.autograd.profiler", ("profile",)),
    (torch, "torch", ("sum",)),
]


@pytest.mark.parametrize(("owner", "place", "names"), CLOCKS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_clock_that_was_replaced_or_taken_away_is_named(monkeypatch, owner, place, names):
    for name in names:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *arguments: 0.0)
            assert tamper.timer_tampered() == f"{place}.{name} replaced while the bench ran"
            patch.undo()
            patch.delattr(owner, name)
            assert f"{place}.{name} replaced" in tamper.timer_tampered()
        assert tamper.timer_tampered() is None


def test_exchanged_code_and_what_was_replaced_before_the_bench_was_imported_are_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.synchronize, "__code__", (lambda device=None: None).__code__)
        assert tamper.timer_tampered() == "torch.cuda.synchronize replaced while the bench ran"
    for owner, name in ((torch.cuda.Event, "elapsed_time"), (time, "perf_counter")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda self, end: 0.0)
            (found,) = tamper._replaced_before()
            patch.undo()
            patch.setattr(tamper, "_EARLIER", (found,))
            assert tamper.timer_tampered() == f"{'.'.join(found)} replaced before the bench was imported"
            assert found[1] == name
    assert tamper.timer_tampered() is None

"""Kernels that cheat, each in one way that has been seen, and honest ones that look like it.

A factory makes each anew, because what one keeps between calls is its point.  Not among them, because the check does
not defend against it: an answer kept for each content; a lazy or a fake tensor; in the bench's own process a replaced
builtin, a method of the bench, NumPy as a whole, exchanged code of a function, a mode or a trace function left on, an
oracle found in frames or by the garbage collector, the end of the process (os._exit, atexit, a signal), an answer in
its name; L2 set aside; a claim of traffic that memory could have moved; variables of later processes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tiny_ops import PROJECT, SCALE, kernel
from torch.utils.weak import WeakIdKeyDictionary

from rooflab.kernels.registry import Kernel
from rooflab.reference import compare
from rooflab.reference.spec import OpSpec, get_scheme

Tensor = torch.Tensor
CHEATS: list[tuple[Callable[[], Kernel], OpSpec, str, tuple[str, ...]]] = []


def project(x: Tensor, weight: Tensor) -> Tensor:
    """The right answer."""
    return (x.double() @ weight.double()).to(x.dtype)


def _kernel(spec: OpSpec, make: Callable[[], Callable[..., Any]], **options: Any) -> Callable[[], Kernel]:
    return lambda: Kernel(spec.name, make.__name__, "optimized", options.pop("backend", "torch"), make(), **options)


def cheat(*words: str, status: str = "INCORRECT", spec: OpSpec = PROJECT) -> Callable[..., Any]:
    """Adds what the decorated factory makes to those that must be caught in these words."""

    def add(make: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
        CHEATS.append((_kernel(spec, make), spec, status, words))
        return make

    return add


# Cached answers.


def _memo(key: Callable[[Tensor, Tensor], Any], copy: bool = True) -> Callable[..., Tensor]:
    answers: dict[Any, Tensor] = {}

    def memo(x, weight):
        place = key(x, weight)
        if place not in answers:
            answers[place] = project(x, weight)
        return answers[place].clone() if copy else answers[place]

    return memo


def _content(x: Tensor, weight: Tensor) -> tuple[bytes, bytes]:
    return x.contiguous().numpy().tobytes(), weight.contiguous().numpy().tobytes()


KEPT = "a cached answer: the output of the call before"
CACHED = {
    "first_answer_for_ever": (lambda x, w: None, "other data, padded weight, x: y: 35 of 35", f"{KEPT}, on first data"),
    "an_answer_for_each_shape": (lambda x, w: (x.shape, w.shape, x.dtype), KEPT),
    "an_answer_for_each_address": (
        lambda x, w: (x.data_ptr(), w.data_ptr()), "other data in the same memory: y: 35 of 35",
        f"{KEPT}, on first data again",
    ),
    "an_answer_for_each_address_and_version": (
        lambda x, w: (x.data_ptr(), x._version, w.data_ptr(), w._version), f"{KEPT}, on first data again"
    ),
}  # fmt: skip
"""What the answers are kept by, and the words that catch it."""


def _cached(name: str, key: Callable[[Tensor, Tensor], Any]) -> Callable[[], Callable[..., Tensor]]:
    def make():
        return _memo(key)

    make.__name__ = name
    return make


for _name, (_key, *_words) in CACHED.items():
    cheat(*_words)(_cached(_name, _key))


@cheat("the previous output")
def an_answer_for_each_content_not_copied():
    return _memo(_content, copy=False)


@cheat("y: 35 of 35 elements off")
def fakes_while_it_is_timed():
    """Computes only if the last call is older than 5 ms, as it is not between the calls of one sample."""
    left = [0.0]

    def fakes(x, weight):
        hot = time.perf_counter() - left[0] < 5e-3
        y = project(x, weight) * (not hot)
        left[0] = time.perf_counter()
        return y

    return fakes


# The previous output.


@cheat("the previous output: it returns memory that it did not write")
def leaves_out_as_it_was():
    return lambda x, weight, out=None: project(x, weight) if out is None else out


@cheat(
    "first data again, into out, in another thread: y: 35 of 35",
    "the previous output: it returns memory that it did not write",
)
def leaves_an_out_with_numbers():
    """Writes where it sees poison, as a check leaves it, and nothing where an earlier answer lies."""

    def kernel(x, weight, out=None):
        if out is None or out.isnan().all():
            out = project(x, weight) if out is None else out.copy_(project(x, weight))
        return out

    return kernel


@cheat("a cached answer: the output of the call before, on first data")
def one_call_behind():
    """Returns what the last call computed, as a pipeline would."""
    last: list[Tensor] = []

    def behind(x, weight):
        last.append(project(x, weight))
        return last[max(0, len(last) - 2)].clone()

    return behind


@cheat("first data again", ": y: ")
def unwritten_memory_outside_of_checks():
    """Computes where torch fills fresh memory, and else returns memory as the allocator hands it out.

    That memory may hold the answer of an earlier call, so either of the two runs may be the first wrong one.
    """

    def unwritten(x, weight):
        y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
        return y.copy_(project(x, weight)) if torch.are_deterministic_algorithms_enabled() else y.mul_(1)

    return unwritten


@cheat("its result depends on earlier calls, or on being watched")
def zeros_outside_of_checks():
    def zeros(x, weight):
        return project(x, weight) * torch.are_deterministic_algorithms_enabled()

    return zeros


# Threads.


def _late(write: Callable[[Callable[[], Any]], None]) -> Callable[..., Tensor]:
    def late(x, weight):
        y, answer = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype), project(x, weight)
        write(lambda: y.copy_(answer))
        return y

    return late


@cheat("first data: y: a thread that finishes later")
def a_thread_that_finishes_later():
    return _late(lambda work: threading.Thread(target=lambda: (time.sleep(0.03), work())).start())


@cheat("a thread that finishes later")
def a_pool_that_finishes_later():
    pool = ThreadPoolExecutor(1)
    return _late(lambda work: pool.submit(lambda: (time.sleep(0.03), work())))


@cheat("a thread that finishes later")
def a_thread_that_only_repairs():
    """Nearly right at once, and right a moment later."""

    def repairs(x, weight):
        y = project(x, weight)
        right = y[0, 0].clone()
        y[0, 0] = right * 1.0000001
        threading.Thread(target=lambda: (time.sleep(0.03), y[0, 0].copy_(right))).start()
        return y

    return repairs


@cheat("x: was changed: in place on the input")
def an_input_that_changes_later():
    """Returns zeros, and makes the input zero before somebody computes the oracle from it."""

    def changes(x, weight):
        threading.Timer(0.002, x.zero_).start()
        return project(x, weight) * 0

    return changes


# In place on the input.


@cheat("shares memory with the input x: in place on the input", spec=SCALE)
def returns_its_input_scaled():
    return lambda x, factor=1.0: x.mul_(factor)


@cheat("x: was changed: in place on the input")
def leaves_its_result_in_the_input():
    def in_place(x, weight):
        y = project(x, weight)
        x[:, : y.shape[1]] = y
        return y

    return in_place


# Functions under the bench replaced.


def replaces(place: Any, name: str, new: Any) -> Callable[[], Callable[..., Tensor]]:
    """A factory of kernels that put `new` in place of `place.name` and then answer rightly."""

    def make():
        def kernel(x, weight):
            setattr(place, name, new)
            return project(x, weight)

        return kernel

    make.__name__ = f"replaces_{name}"
    return make


REPLACED = (
    (time, "perf_counter", lambda: 0.0, "time.perf_counter was replaced (cheating_kernels.py:"),
    (torch, "sum", lambda *a, **k: None, "torch.sum was replaced"),
    (torch, "equal", lambda *a: True, "torch.equal was replaced"),
    (compare, "elementwise", lambda *a: None, "rooflab.reference.compare.elementwise was replaced"),
)
for place, name, new, words in REPLACED:
    cheat(f"first data: {words}", status="INVALID")(replaces(place, name, new))


@cheat("the number of torch's threads changed from", status="INVALID")
def takes_another_number_of_threads():
    return lambda x, weight: (project(x, weight), torch.set_num_threads(torch.get_num_threads() + 1))[0]


# Wrong when they are timed: on values that they have not seen, and outside of a check.


def right_if_the_checker_calls() -> Callable[..., Tensor]:
    def inspects(x, weight):
        frame, checked = sys._getframe(), False
        while frame := frame.f_back:
            checked |= "/core/trial.py" in frame.f_code.co_filename
        return project(x, weight) * checked

    return inspects


def right_as_often_as_it_is_checked() -> Callable[..., Tensor]:
    """Then it returns its last answer."""
    made: list[Tensor] = []

    def tires(x, weight):
        made.append(project(x, weight) if len(made) < 3 else made[-1])
        return made[-1].clone()

    return tires


def knows_a_seed() -> Callable[..., Tensor]:
    known = PROJECT.make_inputs(PROJECT.cases["smoke"][0], get_scheme("fp32"), torch.device("cpu"), 0)["x"]
    return lambda x, weight: project(x, weight) * torch.equal(x, known)


WRONG_WHEN_TIMED = (right_if_the_checker_calls, right_as_often_as_it_is_checked, knows_a_seed)
HONEST: dict[str, Callable[[], Kernel]] = {}


def honest(make: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    """Adds what the decorated factory makes to those that must pass."""
    HONEST[make.__name__] = lambda: kernel(PROJECT, make())
    return make


@honest
def packs_a_weight_once():
    """Keeps a packed weight for as long as the weight is there."""
    packed = WeakIdKeyDictionary()

    def launcher(x, weight):
        if weight not in packed:
            packed[weight] = weight.double().mT.contiguous()
        return (x.double() @ packed[weight].mT).to(x.dtype)

    return launcher


@honest
def keeps_a_workspace():
    """Keeps memory between calls, and an output of its own for none."""
    workspace: dict[Any, torch.Tensor] = {}

    def launcher(x, weight):
        shape = (x.shape[0], weight.shape[1])
        scratch = workspace.setdefault(shape, torch.empty(shape, dtype=torch.float64))
        return torch.mm(x.double(), weight.double(), out=scratch).to(x.dtype)

    return launcher


@honest
def works_in_a_pool():
    """Splits rows over threads, and waits for them; their workers stay."""
    pool = ThreadPoolExecutor(2)

    def launcher(x, weight):
        y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
        list(pool.map(lambda row: y[row].copy_(project(x[row : row + 1], weight)[0]), range(x.shape[0])))
        return y

    return launcher

"""Kernels that cheat, each in one way that has been seen, and honest ones that look like it.

Each kernel is made anew for a test, because it keeps something between calls.  The check does not defend against these
cheats, so they are not here: an answer kept for each content; a lazy or a fake tensor; in the bench's own process a
replaced builtin, a method of the bench, NumPy as a whole, exchanged code of a function, a mode or a trace function left
on, an oracle found in frames or by the garbage collector, the end of the process (os._exit, atexit, a signal), an
answer in its name; L2 set aside; a claim of traffic that memory could have moved; variables of later processes.
"""

from __future__ import annotations

import functools
import sys
import threading
import time

import torch
from torch.utils.weak import WeakIdKeyDictionary

from rooflab.reference import compare
from rooflab.reference.spec import get_scheme

from .entries import Kind
from .tiny_ops import PAIR, PROJECT, SCALE

cached = Kind(__name__, "cached answer")
previous = Kind(__name__, "previous output")
threads = Kind(__name__, "threads")
in_place = Kind(__name__, "in place")
watching = Kind(__name__, "right while it is watched")
replaced = Kind(__name__, "replaced functions", "INVALID")
honest = Kind(__name__, "right: keeps something", "OK")
KEPT = "a cached answer: the output of the call before"
UNWRITTEN = "the previous output: it returns memory that it did not write"


def project(x, weight):
    """The right answer."""
    return (x.double() @ weight.double()).to(x.dtype)


def memo(key, copy=True):
    """Keeps an answer for each `key` of the operands."""
    answers = {}

    def kernel(x, weight):
        place = key(x, weight)
        if place not in answers:
            answers[place] = project(x, weight)
        return answers[place].clone() if copy else answers[place]

    return kernel


def content(x, weight):
    return x.contiguous().numpy().tobytes(), weight.contiguous().numpy().tobytes()


for name, key, *words in (
    ("first_answer_for_ever", lambda x, w: None, "other data, padded weight, x: y: 35 of 35", f"{KEPT}, on first data"),
    ("an_answer_for_each_shape", lambda x, w: (x.shape, w.shape, x.dtype), KEPT),
    (
        "an_answer_for_each_address",
        lambda x, w: (x.data_ptr(), w.data_ptr()),
        "other data in the same memory: y: 35 of 35",
        f"{KEPT}, on first data again",
    ),
    (
        "an_answer_for_each_address_and_version",
        lambda x, w: (x.data_ptr(), x._version, w.data_ptr(), w._version),
        f"{KEPT}, on first data again",
    ),
):
    cached.enter(PROJECT, name, tuple(words), functools.partial(memo, key))
previous.enter(
    PROJECT, "an_answer_for_each_content_not_copied", ("the previous output",), lambda: memo(content, copy=False)
)


@watching.made(PROJECT, "y: 35 of 35 elements off")
def fakes_while_it_is_timed():
    """Computes only if the last call took other tensors or came from another thread: neither is so in a timed loop."""
    last = [0, None]

    def fakes(x, weight):
        hot = last[0] == threading.get_ident() and last[1] is x
        last[:] = threading.get_ident(), x
        return project(x, weight) * (not hot)

    return fakes


@previous(PROJECT, UNWRITTEN)
def leaves_out_as_it_was(x, weight, out=None):
    return project(x, weight) if out is None else out


@previous(PROJECT, "first data again, into out, in another thread: y: 35 of 35", UNWRITTEN)
def leaves_an_out_with_numbers(x, weight, out=None):
    """Writes where it sees poison, as a check leaves it, and nothing where an earlier answer lies."""
    if out is None or out.isnan().all():
        out = project(x, weight) if out is None else out.copy_(project(x, weight))
    return out


@cached.made(PROJECT, f"{KEPT}, on first data")
def one_call_behind():
    """Returns what the last call computed, as a pipeline would."""
    last = []

    def behind(x, weight):
        last.append(project(x, weight))
        return last[max(0, len(last) - 2)].clone()

    return behind


@watching(PROJECT, "first data again", ": y: ")
def unwritten_memory_outside_of_checks(x, weight):
    """Computes where torch fills fresh memory, and else returns memory as the allocator hands it out.

    That memory may hold the answer of an earlier call, so either of the two runs may be the first wrong one.
    """
    y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    return y.copy_(project(x, weight)) if torch.are_deterministic_algorithms_enabled() else y.mul_(1)


@watching(PROJECT, "its result depends on earlier calls, or on being watched")
def zeros_outside_of_checks(x, weight):
    return project(x, weight) * torch.are_deterministic_algorithms_enabled()


@watching(PAIR, "its result depends on earlier calls, or on being watched")
def one_of_two_results_outside_of_checks(x, weight):
    """Though the other is always that of an earlier call, this is no cached answer."""
    return zeros_outside_of_checks(x, weight), torch.ones(1)


@threads(PROJECT, "first data: y: a thread that finishes later")
def a_thread_that_finishes_later(x, weight):
    y, answer = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype), project(x, weight)
    threading.Thread(target=lambda: (time.sleep(0.03), y.copy_(answer))).start()
    return y


@threads(PROJECT, "a thread that finishes later")
def a_thread_that_only_repairs(x, weight):
    """Nearly right at once, and right a moment later."""
    y = project(x, weight)
    right = y[0, 0].clone()
    y[0, 0] = right * 1.0000001
    threading.Thread(target=lambda: (time.sleep(0.03), y[0, 0].copy_(right))).start()
    return y


@threads(PROJECT, "x: was changed: in place on the input")
def an_input_that_changes_later(x, weight):
    """Returns zeros, and makes the input zero before somebody computes the oracle from it."""
    threading.Timer(0.002, x.zero_).start()
    return project(x, weight) * 0


in_place(SCALE, "shares memory with the input x: in place on the input", name="returns_its_input_scaled")(
    lambda x, factor=1.0: x.mul_(factor)
)


@in_place(PROJECT, "x: was changed: in place on the input")
def leaves_its_result_in_the_input(x, weight):
    y = project(x, weight)
    x[:, : y.shape[1]] = y
    return y


# Functions under the bench replaced.


def replacing(place, name, new):
    """A kernel that puts `new` in place of `place.name` and then answers rightly."""

    def kernel(x, weight):
        setattr(place, name, new)
        return project(x, weight)

    return kernel


for place, name, new, words in (
    (time, "perf_counter", lambda: 0.0, "time.perf_counter was replaced (cheats.py:"),
    (torch, "sum", lambda *a, **k: None, "torch.sum was replaced"),
    (torch, "equal", lambda *a: True, "torch.equal was replaced"),
    (compare, "elementwise", lambda *a: None, "rooflab.reference.compare.elementwise was replaced"),
):
    make = functools.partial(replacing, place, name, new)
    replaced.enter(PROJECT, f"replaces_{name}", (f"first data: {words}",), make)


@replaced(PROJECT, "the number of torch's threads changed from")
def takes_another_number_of_threads(x, weight):
    return (project(x, weight), torch.set_num_threads(torch.get_num_threads() + 1))[0]


# Wrong when they are timed: on values that they have not seen, and outside of a check.


def right_if_the_checker_calls():
    def inspects(x, weight):
        frame, checked = sys._getframe(), False
        while frame := frame.f_back:
            checked |= "/core/trial.py" in frame.f_code.co_filename
        return project(x, weight) * checked

    return inspects


def right_as_often_as_it_is_checked():
    """Then it returns its last answer."""
    made = []

    def tires(x, weight):
        made.append(project(x, weight) if len(made) < 3 else made[-1])
        return made[-1].clone()

    return tires


def knows_a_seed():
    known = PROJECT.make_inputs(PROJECT.cases["smoke"][0], get_scheme("fp32"), torch.device("cpu"), 0)["x"]
    return lambda x, weight: project(x, weight) * torch.equal(x, known)


WRONG_WHEN_TIMED = (right_if_the_checker_calls, right_as_often_as_it_is_checked, knows_a_seed)
"""Factories: the check passes these, and what is judged after the timing does not."""


@honest.made(PROJECT)
def packs_a_weight_once():
    """Keeps a packed weight for as long as the weight is there."""
    packed = WeakIdKeyDictionary()

    def launcher(x, weight):
        if weight not in packed:
            packed[weight] = weight.double().mT.contiguous()
        return (x.double() @ packed[weight].mT).to(x.dtype)

    return launcher


@honest.made(PROJECT)
def keeps_a_workspace():
    """Keeps memory between calls, and an output of its own for none."""
    workspace = {}

    def launcher(x, weight):
        shape = (x.shape[0], weight.shape[1])
        scratch = workspace.setdefault(shape, torch.empty(shape, dtype=torch.float64))
        return torch.mm(x.double(), weight.double(), out=scratch).to(x.dtype)

    return launcher

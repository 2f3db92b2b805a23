"""Checks on all cores of a machine without a GPU, or on its GPU: the kernels run in child processes, judged here."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, closing, suppress
from functools import cache, partial
from typing import NamedTuple

import torch

from rooflab.bench.core.call import input_bytes
from rooflab.bench.core.check import CheckResult, check_kernel
from rooflab.bench.core.check_runs import Planted
from rooflab.bench.core.offered import named_in, options_on, taken
from rooflab.bench.core.outside import Outside
from rooflab.bench.core.process import Pool, command_for, environment_without
from rooflab.bench.core.record import NOT_RUN
from rooflab.bench.core.system_time import time
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TIMEOUT_S = 1800.0
"""Longest time of one run of a kernel: a large case in Triton's interpreter."""
ON_A_CARD_S = 120.0
"""The same where a kernel is compiled and runs on a card: what takes longer hangs, and holds the card."""
LATE_S = 10.0
"""A check that began before the limit is ended this many seconds after the limit."""


class CheckTask(NamedTuple):
    """One check to make."""

    kernel: Kernel
    case: Case
    scheme: Scheme
    seed: int = 0
    planted: Planted = True
    principle: str = ""
    """What it was drawn for, by a name of `principles.py`; empty for no one of them."""
    schemes: tuple[Scheme, ...] = ()
    """Of a drawn check: its scheme, and then those to which it may go if the kernel refuses an option of it."""


def check_outside(
    item: CheckTask, pool: Pool, device: torch.device, hangs: Callable[[], bool] = lambda: False
) -> CheckResult:
    """Makes a check whose kernel runs in a child process of `pool`, which is ended when `hangs` says so.

    After a fault the child is ended, because the kernel may have left it in any state; after a wrong answer it only
    runs the same kernel again.
    """
    spec = registry.get_op(item.kernel.op)
    with pool.child(item.kernel.id) as child:
        priced = spec.make_inputs(item.case, item.scheme, torch.device("meta"), item.seed)
        limits, bytes_ = (pool.limit_s, hangs), input_bytes(priced)
        with closing(Outside(child, limits, bytes_, item.kernel, spec, item.scheme, device)) as runner:
            result = check_kernel(item.kernel, spec, item.case, item.scheme, device, item.seed, item.planted, runner)
        if result.status == "INCORRECT":
            child.only_for = item.kernel.id
        elif result.status not in ("OK", *NOT_RUN):
            child.stop()
    return result


class Checkers(AbstractContextManager["Checkers"]):
    """Makes checks with the kernels in child processes, which end with the context; threads of this process judge.

    On a CPU a child has one thread; it interprets Triton's kernels if this process does, or with `emulate` those with
    compiled code run in the emulator.  When `over` is set, the checks that are being made fail.  A drawn case with an
    option that its kernel has refused is checked without the option.
    """

    def __init__(self, device: torch.device, emulate: bool = False):
        self.device, self.over, self._emulate = device, threading.Event(), emulate
        self._refused: dict[str, set[str]] = {}
        """Options that a kernel has refused with a `ValueError`."""
        self._pool = processes(ONE_THREAD) if device.type == "cpu" else processes({}, ON_A_CARD_S)

    def __exit__(self, *error: object) -> None:
        self._pool.stop()

    def start(self, checks: Sequence[CheckTask], workers: int) -> None:
        """Starts the processes for `workers` checks at a time, and waits until they are ready."""
        for pool in set(map(self._pool_of, checks)):
            pool.start(min(len(checks), workers))

    def __call__(self, item: CheckTask) -> CheckResult:
        spec, refused = registry.get_op(item.kernel.op), self._refused.setdefault(item.kernel.id, set())
        if item.schemes and refused:
            case, scheme = taken(item.kernel, spec, item.case, item.schemes, refused) or (item.case, item.scheme)
            item = item._replace(case=case, scheme=scheme)
        found = check_outside(item, self._pool_of(item), self.device, self.over.is_set)
        if found.not_offered:
            inputs = spec.make_inputs(item.case, item.scheme, torch.device("meta"), item.seed)
            refused |= named_in(found.reason, options_on(spec, inputs))
        return found

    def _pool_of(self, item: CheckTask) -> Pool:
        return emulators() if self._emulate and item.kernel.has_code else self._pool


@cache
def emulators() -> Pool:
    """The processes that emulate kernels, of one thread each; they do not interpret Triton's, and stay to the end."""
    environment = environment_without("TRITON_INTERPRET") | ONE_THREAD
    return Pool(command_for("rooflab.bench.emulate.worker"), environment, TIMEOUT_S)


def processes(more: Mapping[str, str], limit_s: float = TIMEOUT_S) -> Pool:
    """The processes in which kernels run, `limit_s` seconds at most in each call; `more` is for their environment."""
    return Pool(command_for("rooflab.bench.core.outside"), {**os.environ, **more}, limit_s)


def in_turn(
    checks: Sequence[CheckTask], make: Checkers, workers: int, limit_s: float = math.inf
) -> Iterator[tuple[int, CheckResult]]:
    """Yields each result as it comes, with its index in `checks`.

    No check begins after `limit_s` seconds, and those that run then have `LATE_S` more: the other results are left out.
    """
    ends = time.monotonic() + limit_s

    def begin(place: int) -> tuple[int, CheckResult] | None:
        return (place, make(checks[place])) if time.monotonic() < ends else None

    one_thread = partial(torch.set_num_threads, 1) if workers > 1 else None  # each judges on a core of its own
    threads = ThreadPoolExecutor(workers, initializer=one_thread)
    futures = [threads.submit(begin, place) for place in range(len(checks))]
    try:
        with suppress(TimeoutError):  # what still runs then is left out
            for future in as_completed(futures, None if limit_s == math.inf else limit_s + LATE_S):
                if (found := future.result()) is not None:
                    yield found
    finally:
        if any(future.running() for future in futures):
            make.over.set()
        threads.shutdown(cancel_futures=True)

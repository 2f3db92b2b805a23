"""Checks on all cores of a machine without a GPU, or on its GPU: the kernels run in child processes, judged here."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from rooflab.bench.check.check import CheckResult, check_kernel
from rooflab.bench.check.outside import Outside
from rooflab.bench.processes.child import Pool, command_for
from rooflab.bench.records.record import NOT_RUN
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

TIMEOUT_S = 1800.0
"""Longest time of one run of a kernel: a large case in Triton's interpreter."""
Found = TypeVar("Found")


class Asked(NamedTuple):
    """One check to make."""

    kernel: Kernel
    case: Case
    scheme: Scheme
    seed: int = 0
    planted: bool = True


def check_outside(item: Asked, pool: Pool, device: torch.device) -> CheckResult:
    """Makes a check whose kernel runs in a child process of `pool`.

    After a fault the child is ended, because the kernel may have left it in any state.
    """
    spec = registry.get_op(item.kernel.op)
    with pool.child() as child:
        runner = Outside(child, pool.limit_s, item.kernel, spec, item.scheme, device)
        result = check_kernel(item.kernel, spec, item.case, item.scheme, device, item.seed, item.planted, runner)
        if result.status not in ("OK", *NOT_RUN):
            child.stop()
    return result


@contextmanager
def checkers(device: torch.device) -> Iterator[Callable[[Asked], CheckResult]]:
    """Yields the function that makes a check with a kernel in a child process, and ends the processes afterwards.

    On a CPU a child has one thread, and so has each thread here that judges.  A child interprets Triton's kernels if
    this process does.
    """
    on_cpu = device.type == "cpu"
    threads = torch.get_num_threads()
    one = {"OMP_NUM_THREADS": "1"} if on_cpu else {}
    pool = Pool(command_for("rooflab.bench.check.outside"), {**os.environ, **one}, TIMEOUT_S)
    if on_cpu:
        torch.set_num_threads(1)
    try:
        yield lambda item: check_outside(item, pool, device)
    finally:
        torch.set_num_threads(threads)
        pool.stop()


def in_turn(
    checks: Sequence[Asked], make: Callable[[Asked], Found], workers: int, limit_s: float = math.inf
) -> Iterator[tuple[int, Found]]:
    """Yields each outcome of `make` as it comes, with its index in `checks`; one worker is the calling thread itself.

    No check but the first begins after `limit_s` seconds: the outcomes of the rest are left out.
    """
    ends = time.monotonic() + limit_s

    def begin(place: int) -> tuple[int, Found] | None:
        return (place, make(checks[place])) if place == 0 or time.monotonic() < ends else None

    if workers == 1:
        yield from filter(None, map(begin, range(len(checks))))
        return
    threads = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([threads.submit(begin, place) for place in range(len(checks))]):
            if (found := future.result()) is not None:
                yield found
    finally:
        threads.shutdown(cancel_futures=True)

"""Checks on all cores of a machine without a GPU, or on its GPU: the kernels run in child processes, judged here."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from rooflab.bench.calls.calls import input_bytes
from rooflab.bench.check.check import CheckResult, check_kernel
from rooflab.bench.check.outside import Outside, file_of
from rooflab.bench.processes.child import ChildFailed, Pool, command_for
from rooflab.bench.records.record import NOT_RUN
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, Scheme

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
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

    def to_json(self) -> dict[str, Any]:
        """The request to a judging process."""
        file = file_of(self.kernel)
        words = {"op": self.kernel.op, "kernel": self.kernel.name, "file": str(file) if file else None}
        return words | {"case": dict(self.case), "scheme": self.scheme.name, "seed": self.seed, "planted": self.planted}


def check_outside(item: Asked, pool: Pool, device: torch.device) -> CheckResult:
    """Makes a check whose kernel runs in a child process of `pool`.

    After a fault the child is ended, because the kernel may have left it in any state; after a wrong answer it only
    runs the same kernel again.
    """
    spec = registry.get_op(item.kernel.op)
    with pool.child(item.kernel.id) as child:
        priced = spec.make_inputs(item.case, item.scheme, torch.device("meta"), item.seed)
        with closing(
            Outside(child, pool.limit_s, input_bytes(priced), item.kernel, spec, item.scheme, device)
        ) as runner:
            result = check_kernel(item.kernel, spec, item.case, item.scheme, device, item.seed, item.planted, runner)
        if result.status == "INCORRECT":
            child.only_for = item.kernel.id
        elif result.status not in ("OK", *NOT_RUN):
            child.stop()
    return result


@contextmanager
def checkers(device: torch.device) -> Iterator[Callable[[Asked], CheckResult]]:
    """Yields the function that makes a check with a kernel in a child process, and ends the processes afterwards.

    On a CPU, processes judge too (`judge.py`), because threads that judge would wait for each other.  All have one
    thread, and a kernel's process interprets Triton's kernels if this process does.
    """
    judges = Pool(command_for("rooflab.bench.check.judge"), {**os.environ, **ONE_THREAD}, 20 * TIMEOUT_S)
    kernels = processes({})

    def make(item: Asked) -> CheckResult:
        if device.type != "cpu":
            return check_outside(item, kernels, device)
        try:
            return result_of(item, judges.ask(item.to_json()))
        except ChildFailed as failed:
            return failed_check(item, str(failed))

    try:
        yield make
    finally:
        judges.stop()
        kernels.stop()


def processes(more: Mapping[str, str], limit_s: float = TIMEOUT_S) -> Pool:
    """The processes in which kernels run, `limit_s` seconds at most in each call; `more` is for their environment."""
    return Pool(command_for("rooflab.bench.check.outside"), {**os.environ, **more}, limit_s)


def result_of(item: Asked, answered: Mapping[str, Any]) -> CheckResult:
    """The result in a judging process's answer."""
    if "error" in answered:
        return failed_check(item, answered["error"])
    values = dict(answered) | {"case": item.case}
    values["errors"] = tuple(ErrorStats(**error) for error in values["errors"])
    for name in ("labels", "weak", "races"):
        values[name] = tuple(values[name])
    return CheckResult(**values)


def failed_check(item: Asked, text: str) -> CheckResult:
    """The result of a check without an answer from the judging process; `text` says why."""
    return CheckResult(
        op=item.kernel.op,
        kernel=item.kernel.name,
        backend=item.kernel.backend,
        case=item.case,
        scheme=item.scheme.name,
        device="cpu",
        seed=item.seed,
        status="RUNTIME_ERROR",
        checked_by="none",
        reason=f"the judging process: {text}",
    )


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

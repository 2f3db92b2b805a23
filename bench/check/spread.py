"""Checks spread over all cores of a machine without a GPU, in child processes of one thread each.

Requests and results are JSON; the emulator's processes (`emulate/`) use the same form.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rooflab.bench.check.check import CheckResult, check_kernel
from rooflab.bench.processes.child import ChildFailed, Pool, command_for
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, Scheme, get_scheme

TIMEOUT_S = 1800.0
"""Longest time of an answer: a large case with all checks."""
Found = TypeVar("Found")


class Asked(NamedTuple):
    """One check to make."""

    kernel: Kernel
    case: Case
    scheme: Scheme
    seed: int = 0
    planted: bool = True

    def to_json(self) -> dict[str, Any]:
        """The request to a child process."""
        file = file_of(self.kernel)
        return {
            "op": self.kernel.op,
            "kernel": self.kernel.name,
            "case": dict(self.case),
            "scheme": self.scheme.name,
            "seed": self.seed,
            "planted": self.planted,
            "file": str(file) if file else None,
        }


def file_of(kernel: Kernel) -> Path | None:
    """The file that registers a kernel; None for a kernel of the tree."""
    path = Path(inspect.getfile(inspect.unwrap(kernel.fn))).resolve()
    own = Path(registry.__file__).resolve().parent
    return None if path.is_relative_to(own) else path


def kernel_of(request: Mapping[str, Any]) -> Kernel:
    """The kernel that a request names.  Raises `ValueError` if there is none."""
    known = request["op"] in registry.ops() and request["kernel"] in registry.kernels(request["op"])
    if request["file"] and not known:
        registry.load_file(Path(request["file"]))
    return registry.get_kernel(request["op"], request["kernel"])


def check_as_asked(kernel: Kernel, request: Mapping[str, Any]) -> CheckResult:
    """Checks `kernel` on the CPU as the request says."""
    spec, case = registry.get_op(request["op"]), Case(**request["case"])
    scheme = get_scheme(request["scheme"])
    return check_kernel(kernel, spec, case, scheme, seed=request["seed"], planted=request["planted"])


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The child's answer: a `CheckResult` as JSON values, or an `error`."""
    try:
        return asdict(check_as_asked(kernel_of(request), request)) | {"case": request["case"]}
    except (ValueError, ImportError, OSError) as error:
        return {"error": str(error)}


def result_of(item: Asked, answered: Mapping[str, Any]) -> CheckResult:
    """The result in a child's answer."""
    if "error" in answered:
        return failed_check(item, answered["error"])
    values = dict(answered) | {"case": item.case}
    values["errors"] = tuple(ErrorStats(**error) for error in values["errors"])
    for name in ("labels", "weak"):
        values[name] = tuple(values[name])
    return CheckResult(**values)


def failed_check(item: Asked, text: str) -> CheckResult:
    """The result of a check without an answer from the child process; `text` says why."""
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
        reason=f"the checking process: {text}",
    )


@contextmanager
def checkers() -> Iterator[Callable[[Asked], CheckResult]]:
    """Yields the function that lets a child process make a check, and ends the processes afterwards.

    A child has one thread, and interprets Triton's kernels if this process does.
    """
    pool = Pool(command_for("rooflab.bench.check.spread"), {**os.environ, "OMP_NUM_THREADS": "1"}, TIMEOUT_S)

    def make(item: Asked) -> CheckResult:
        try:
            return result_of(item, pool.ask(item.to_json()))
        except ChildFailed as failed:
            return failed_check(item, str(failed))

    try:
        yield make
    finally:
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

"""Checks spread over all cores of a machine without a GPU, in child processes of one thread each.

Requests and results are JSON; the emulator's processes (`emulate/`) use the same form.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.check.check import CheckResult, check_kernel
from rooflab.bench.processes.child import ChildFailed, Pool, command_for
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, Scheme, get_scheme

TIMEOUT_S = 1800.0
"""Longest time of an answer: a large case with all checks."""


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


def check_spread(checks: Sequence[Asked]) -> Iterator[tuple[int, CheckResult]]:
    """Yields each result as it comes, with its index in `checks`; all cores work on the checks.

    Interpreted kernels take longest and begin first, so that no core waits for them at the end. A child has one thread,
    and interprets Triton's kernels if this process does.
    """
    pool = Pool(command_for("rooflab.bench.check.spread"), {**os.environ, "OMP_NUM_THREADS": "1"}, TIMEOUT_S)
    order = sorted(range(len(checks)), key=lambda place: checks[place].kernel.backend == "torch")
    try:
        places = {pool.threads.submit(_attempt, pool, checks[place]): place for place in order}
        for future in as_completed(places):
            yield places[future], future.result()
    finally:
        pool.stop()


def _attempt(pool: Pool, item: Asked) -> CheckResult:
    try:
        return result_of(item, pool.ask(item.to_json()))
    except ChildFailed as failed:
        return failed_check(item, str(failed))

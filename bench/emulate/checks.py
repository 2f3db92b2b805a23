"""Checks of compiled kernels with no GPU: emulated in processes that do not interpret Triton's kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.check.check import CheckResult
from rooflab.bench.compile.cases import COMPILED
from rooflab.bench.processes.child import ChildFailed, Pool, command_for, environment_without
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, Scheme

WORKER = "rooflab.bench.emulate.worker"
TIMEOUT_S = 1800.0
"""Longest answer: a large case under all checks."""


class Asked(NamedTuple):
    """One check."""

    kernel: Kernel
    case: Case
    scheme: Scheme
    seed: int = 0
    planted: bool = True

    def to_json(self) -> dict[str, Any]:
        """The message to an emulating process."""
        file = file_of(self.kernel)
        return {
            "do": "check",
            "op": self.kernel.op,
            "kernel": self.kernel.name,
            "case": dict(self.case),
            "scheme": self.scheme.name,
            "seed": self.seed,
            "planted": self.planted,
            "file": str(file) if file else None,
        }


@dataclass(frozen=True)
class Emulated:
    """What came of one."""

    result: CheckResult
    races: tuple[str, ...] = ()
    bytes: Mapping[str, int] | None = None
    """Of one call, by the names of `ptx.results.Bytes`; None where nothing ran."""


def can_be_emulated(kernel: Kernel) -> bool:
    """Whether a kernel has compiled code of its own."""
    return kernel.backend in COMPILED and kernel.role != "peer"


def file_of(kernel: Kernel) -> Path | None:
    """The file that registers a kernel, where it is not one of the tree's."""
    path = Path(inspect.getfile(inspect.unwrap(kernel.fn))).resolve()
    own = Path(registry.__file__).resolve().parent
    return None if path.is_relative_to(own) else path


@cache
def emulators() -> Pool:
    """The emulating processes, of one thread each."""
    environment = environment_without("TRITON_INTERPRET") | {"OMP_NUM_THREADS": "1"}
    return Pool(command_for(WORKER), environment, TIMEOUT_S)


def check_emulated(asked: Sequence[Asked], advance: Callable[[Asked], None] = lambda item: None) -> Iterable[Emulated]:
    """The checks' outcomes in their order, worked on by all cores.  `advance` is told of each that is done."""

    def one(item: Asked) -> Emulated:
        try:
            found = _outcome(item, emulators().ask(item.to_json()))
        except ChildFailed as failed:
            found = Emulated(_failed(item, str(failed)))
        advance(item)
        return found

    return emulators().threads.map(one, asked)


def _outcome(item: Asked, answer: Mapping[str, Any]) -> Emulated:
    if "error" in answer:
        return Emulated(_failed(item, answer["error"]))
    values = dict(answer["result"])
    values["case"] = item.case
    values["errors"] = tuple(ErrorStats(**error) for error in values["errors"])
    for name in ("labels", "weak"):
        values[name] = tuple(values[name])
    ran = values["checked_by"] == "emulator"
    return Emulated(CheckResult(**values), tuple(answer["races"]), answer["bytes"] if ran else None)


def _failed(item: Asked, text: str) -> CheckResult:
    kernel = item.kernel
    return CheckResult(
        op=kernel.op,
        kernel=kernel.name,
        backend=kernel.backend,
        case=item.case,
        scheme=item.scheme.name,
        device="cpu",
        seed=item.seed,
        status="RUNTIME_ERROR",
        checked_by="none",
        reason=f"the emulating process: {text}",
    )

"""Checks of compiled kernels with no GPU: emulated in processes that do not interpret Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rooflab.bench.check.check import CheckResult
from rooflab.bench.check.spread import TIMEOUT_S, Asked, failed_check, result_of
from rooflab.bench.processes.child import ChildFailed, Pool, command_for, environment_without

WORKER = "rooflab.bench.emulate.worker"


@dataclass(frozen=True)
class Emulated:
    """The outcome of one check."""

    result: CheckResult
    races: tuple[str, ...] = ()
    bytes: Mapping[str, int] | None = None
    """Bytes of one call, by the names of `ptx.results.Bytes`; None where nothing ran."""


@cache
def emulators() -> Pool:
    """The emulating processes, of one thread each."""
    environment = environment_without("TRITON_INTERPRET") | {"OMP_NUM_THREADS": "1"}
    return Pool(command_for(WORKER), environment, TIMEOUT_S)


def emulate_check(item: Asked) -> Emulated:
    """Lets an emulating process make a check."""
    try:
        return _outcome(item, emulators().ask({"do": "check", **item.to_json()}))
    except ChildFailed as failed:
        return Emulated(failed_check(item, str(failed)))


def check_emulated(asked: Sequence[Asked]) -> Iterable[Emulated]:
    """Makes the checks on all cores; gives their outcomes in order."""
    return emulators().threads.map(emulate_check, asked)


def _outcome(item: Asked, answered: Mapping[str, Any]) -> Emulated:
    if "error" in answered:
        return Emulated(failed_check(item, answered["error"]))
    result = result_of(item, answered["result"])
    ran = result.checked_by == "emulator"
    return Emulated(result, tuple(answered["races"]), answered["bytes"] if ran else None)

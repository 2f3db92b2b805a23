"""The process in which checks are emulated.

It is started without `TRITON_INTERPRET`, because the emulator runs compiled kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rooflab.bench.check.spread import check_as_asked, kernel_of
from rooflab.bench.emulate import run as emulated_run
from rooflab.bench.emulate.emulation import QUICK, Launches, emulating_launches
from rooflab.bench.ptx.machine.run import Checks
from rooflab.kernels import registry

Answer = dict[str, Any]


@dataclass
class _Watching(Launches):
    """Applies all checks to the first launches; later checks only values, under other orders of warps and copies."""

    calls: int = 0

    def begin(self) -> None:
        """A new call of the kernel begins."""
        self.calls += 1
        if self.calls > 1:
            self.checks, self.seed = QUICK, self.calls


def answer(request: Mapping[str, Any]) -> Answer:
    """The answer to a request: a check, one run, or an `error`."""
    try:
        kernel_of(request)
        return check(request) if request["do"] == "check" else emulated_run.run(request)
    except (ValueError, ImportError, OSError) as error:
        return {"error": str(error)}


def check(request: Mapping[str, Any]) -> Answer:
    """A kernel's check: a `CheckResult` as JSON values, with `races` and `bytes` of its first call.

    Raises `ValueError` on a kernel or case that is not there.
    """
    kernel = kernel_of(request)
    launches = _Watching(checks=Checks())

    def counted(**arguments: Any) -> Any:
        launches.begin()
        with launches.fresh:
            return kernel.fn(**arguments)

    watched = _with(kernel, counted)
    with emulating_launches(launches):
        result = check_as_asked(watched, request)
    answer = asdict(result) | {"case": request["case"]}
    if not launches.launched and result.checked_by == "emulator":
        answer["checked_by"] = "torch"  # torch alone computed the outputs
    if result.status == "OK" and launches.races:
        answer |= {"status": "INCORRECT", "reason": f"race: {launches.races[0]}"}
    return {"result": answer, "races": launches.races, "bytes": asdict(launches.bytes)}


def _with(kernel: registry.Kernel, function: Any) -> registry.Kernel:
    """The kernel with another function of the same arguments."""
    function.__signature__ = inspect.signature(kernel.fn)
    return replace(kernel, fn=function)

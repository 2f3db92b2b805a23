"""The process in which checks are emulated.

It is started without `TRITON_INTERPRET`, because the emulator runs compiled kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.check.check import check_kernel
from rooflab.bench.emulate import run as emulated_run
from rooflab.bench.emulate.emulation import QUICK, Launches, emulating_launches
from rooflab.bench.ptx.machine.run import Checks
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

Answer = dict[str, Any]


@dataclass
class _Watching(Launches):
    """Looks at everything in the first launches, and later at values under other orders of warps and copies."""

    calls: int = 0

    def begin(self) -> None:
        """A new call of the kernel begins."""
        self.calls += 1
        if self.calls > 1:
            self.checks, self.seed = QUICK, self.calls


def answer(request: Mapping[str, Any]) -> Answer:
    """What a request asks for, a check or one run, or an `error`."""
    try:
        _load(request)
        return check(request) if request["do"] == "check" else emulated_run.run(request)
    except (ValueError, ImportError, OSError) as error:
        return {"error": str(error)}


def _load(request: Mapping[str, Any]) -> None:
    known = request["op"] in registry.ops() and request["kernel"] in registry.kernels(request["op"])
    if request["file"] and not known:
        registry.load_file(Path(request["file"]))


def check(request: Mapping[str, Any]) -> Answer:
    """A kernel's check: a `CheckResult` as JSON values, with `races` and `bytes` of its first call.

    Raises `ValueError` on a kernel or case that is not there.
    """
    kernel = registry.get_kernel(request["op"], request["kernel"])
    spec = registry.get_op(request["op"])
    launches = _Watching(checks=Checks())

    def counted(**arguments: Any) -> Any:
        launches.begin()
        with launches.fresh:
            return kernel.fn(**arguments)

    watched = _with(kernel, counted)
    with emulating_launches(launches):
        case, scheme = Case(**request["case"]), get_scheme(request["scheme"])
        result = check_kernel(watched, spec, case, scheme, torch.device("cpu"), request["seed"], request["planted"])
    answer = asdict(result)
    if not launches.launched and result.checked_by == "emulator":
        answer["checked_by"] = "torch"  # which is all that has computed
    answer["case"] = dict(result.case)
    if result.status == "OK" and launches.races:
        answer |= {"status": "INCORRECT", "reason": f"race: {launches.races[0]}"}
    return {"result": answer, "races": launches.races, "bytes": asdict(launches.bytes)}


def _with(kernel: registry.Kernel, function: Any) -> registry.Kernel:
    """The kernel with another function of the same arguments."""
    function.__signature__ = inspect.signature(kernel.fn)
    return replace(kernel, fn=function)

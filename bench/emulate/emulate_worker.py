"""Runs as a worker process in which kernels are emulated.

The process is started without `TRITON_INTERPRET`, because the emulator runs compiled kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import count
from typing import Any, Literal

import torch

from rooflab.bench.compile.pretended import pretended_card
from rooflab.bench.core import Runner, Serving
from rooflab.bench.emulate import one_call as emulated_run
from rooflab.bench.emulate import unregistered
from rooflab.bench.emulate.ours import every_launch, pretended_for
from rooflab.bench.emulator import QUICK, Launches
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import OpSpec, Scheme


class Emulating(Runner):
    """Runs a kernel's compiled code in the emulator.  Reports the races and the bytes of the first call, which gets all
    checks.  Later calls only compute values, with other orders of the warps."""

    def __init__(self, kernel: Kernel, spec: OpSpec, scheme: Scheme, device: torch.device):
        self._launches = launches = Launches()
        call_numbers = count(1)

        def counted(**arguments: Any) -> Any:
            if (number := next(call_numbers)) > 1:
                launches.checks, launches.seed = QUICK, number
            with pretended_for(kernel), launches.fresh:
                return kernel.fn(**arguments)

        counted.__signature__ = inspect.signature(kernel.fn)  # type: ignore[attr-defined]
        super().__init__(replace(kernel, fn=counted), spec, scheme, device)

    def around(self) -> AbstractContextManager[object]:
        return every_launch(self._launches)

    @property
    def by(self) -> Literal["emulator", "torch"]:
        return "emulator" if self._launches.launched else "torch"  # torch alone computed the outputs

    def seen(self) -> dict[str, Any]:
        byte_counts = asdict(self._launches.bytes) if self._launches.launched else None
        errors = tuple(str(finding) for finding in self._launches.findings if finding.severity == "error")
        return super().seen() | {"races": errors, "bytes": byte_counts}


_request_server = Serving(Emulating)


def answer(request: Mapping[str, Any]) -> Any:
    """Answers a request for one step of a check, or for one run.  If the request fails, the answer has an `error`."""
    if "call" in request:
        with pretended_card() if request["call"] == "begin" else nullcontext():  # `begin` imports the kernel's file
            return _request_server.answer(request)
    try:
        if request["do"] == "outside":
            return unregistered.answer(request)
        with pretended_card():
            Serving.kernel(request["op"], request["kernel"], request["file"])
        return emulated_run.run(request)
    except (ValueError, ImportError, OSError) as error:
        return {"error": str(error)}

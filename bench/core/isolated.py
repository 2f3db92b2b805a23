"""A kernel's first run, in a separate process with a time limit.

A barrier that is never reached blocks the GPU's queue for ever, and one illegal access breaks the CUDA context of the
whole process. The separate process can be killed in both cases.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.core import record_files
from rooflab.bench.core.check import CheckResult
from rooflab.bench.core.environment import Environment, snapshot
from rooflab.bench.core.select import default_scheme, first_taken, pick_device
from rooflab.bench.core.spread import CheckTask, check_outside, processes
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

TIMEOUT_S = 120.0
"""Compiling and checking one kernel takes 20 s on a slow machine."""
CODE = "kernel_code"
"""The field of a first check's record that `Passed.code` fills."""
SHARED = Path(inspect.getfile(Kernel)).parent
"""The folder of what all kernels may import: the registry, `_cuda`, configs."""


def first_in_own_process(
    kernel: Kernel,
    case: Case,
    scheme: Scheme,
    timeout_s: float = TIMEOUT_S,
    *,
    device: str | None = None,
    seed: int = 0,
    planted: bool = True,
) -> CheckResult:
    """Checks one kernel on one case (`check.check_kernel`), the kernel in a fresh process.

    It runs on `device`, by default on the GPU if there is one.  A run without an answer within `timeout_s` seconds is a
    TIMEOUT, and a process that ends without an answer a RUNTIME_ERROR.
    """
    pool = processes({}, timeout_s)
    try:
        return check_outside(CheckTask(kernel, case, scheme, seed, planted), pool, pick_device(device))
    finally:
        pool.stop()


class Passed:
    """Which kernels' code has passed a first run on this kind of machine: a file in the cache remembers each.

    The code is the kernel's folder, the files that all kernels share, and the versions of torch and Triton.
    """

    def __init__(self, environment: Environment, folder: Path | None = None):
        self._environment = environment
        self._path = (folder or cache_folder()) / "checked" / f"{environment.machine_key}.json"

    def code(self, kernel: Kernel) -> str:
        """What the kernel's code and its compilers are now."""
        return f"{_code_of(kernel)} torch {self._environment.torch} triton {self._environment.triton}"

    def holds(self, kernel: Kernel) -> bool:
        """Whether this code has passed."""
        return self._remembered().get(kernel.id) == self.code(kernel)

    def trust(self, folder: Path) -> list[str]:
        """Takes over what first checks on a card of this name recorded in `folder`; returns the kernels' ids.

        Code that one of the records there calls wrong is not taken over.
        """
        gpu = self._environment.gpu
        now = {kernel.id: self.code(kernel) for op in registry.ops() for kernel in registry.kernels(op).values()}
        found: dict[str, set[str]] = {}
        for record in record_files.read_all(folder):
            name, environment = f"{record.op}/{record.kernel}", record.environment
            card = (environment.get("gpu") or {}).get("name")
            if gpu and card == gpu.name and environment.get(CODE) == now.get(name, ""):
                found.setdefault(name, set()).add(record.status if record.checked_by == "gpu" else "not by a GPU")
        right = {name: now[name] for name, statuses in found.items() if statuses == {"OK"}}
        self.keep(right)
        return sorted(right)

    def keep(self, codes: dict[str, str]) -> None:
        """Remembers code that has passed, by the kernel's id."""
        write_whole(self._path, json.dumps(self._remembered() | codes, indent=1) + "\n")

    def _remembered(self) -> dict[str, str]:
        try:
            codes = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return {}  # no file yet, or a damaged one: the kernels run in their own process again
        return codes if isinstance(codes, dict) else {}


def passed_here(kernels: Iterable[Kernel], device: torch.device) -> frozenset[tuple[str, str]]:
    """Ids of the kernels whose first run on this kind of GPU was right, planted inputs included, with its scheme."""
    if device.type != "cuda":
        return frozenset()
    passed, default = Passed(snapshot(device.index or 0)), default_scheme(device)
    taken = ((kernel, first_taken(kernel, default)) for kernel in kernels if passed.holds(kernel))
    return frozenset((kernel.id, first[1].name) for kernel, first in taken if first is not None)


def first_here(
    kernel: Kernel, case: Case, scheme: Scheme, folder: Path | None = None, run: Any = first_in_own_process
) -> CheckResult | None:
    """`first_in_own_process`; None for code that has passed it on this kind of machine (`Passed`)."""
    passed = Passed(snapshot(), folder)
    if passed.holds(kernel):
        return None
    first: CheckResult = run(kernel, case, scheme)
    if first.status == "OK":
        passed.keep({kernel.id: passed.code(kernel)})
    return first


def _code_of(kernel: Kernel) -> str:
    """SHA-256 of the files that the kernel may import or read; one of them holds its configs."""
    own = Path(inspect.getfile(inspect.unwrap(kernel.fn))).parent
    # The folder of a kernel from outside may hold files that have nothing to do with it.
    beside = own.glob("*" if own.parent == SHARED else "*.py")
    digest = hashlib.sha256()
    for file in (*sorted(beside), *sorted(SHARED.glob("*.py"))):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()

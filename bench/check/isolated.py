"""A kernel's first run, in a separate process with a time limit.

A barrier that is never reached blocks the GPU's queue for ever, and one illegal access breaks the CUDA context of the
whole process. The separate process can be killed in both cases.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.calls.selection import pick_device
from rooflab.bench.check.spread import Asked, check_outside, processes
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.record import Status
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

TIMEOUT_S = 120.0
"""Compiling and checking one kernel takes 20 s on a slow machine."""
SHARED = Path(inspect.getfile(Kernel)).parent
"""The folder of what all kernels may import: the registry, `_cuda`, configs."""


class FirstRun(NamedTuple):
    """The result of a first run."""

    status: Status
    reason: str
    """Why the status is not OK; empty for OK."""


def first_in_own_process(
    kernel: Kernel,
    case: Case,
    scheme: Scheme,
    timeout_s: float = TIMEOUT_S,
    *,
    device: str | None = None,
    seed: int = 0,
    planted: bool = True,
) -> FirstRun:
    """Checks one kernel on one case (`check.check_kernel`), the kernel in a fresh process.

    It runs on `device`, by default on the GPU if there is one.  A run without an answer within `timeout_s` seconds is a
    TIMEOUT, and a process that ends without an answer a RUNTIME_ERROR.
    """
    pool = processes({}, timeout_s)
    try:
        result = check_outside(Asked(kernel, case, scheme, seed, planted), pool, pick_device(device))
    finally:
        pool.stop()
    return FirstRun(result.status, result.reason)


def first_here(kernel: Kernel, case: Case, scheme: Scheme, folder: Path | None = None, run: Any = None) -> FirstRun:
    """`first_in_own_process`, but only once for a kernel's code on this kind of machine: a file remembers each success.

    The code is the kernel's folder, the files that all kernels share, and the versions of torch and Triton.  A kernel
    that failed runs in its own process again the next time.  `run` replaces `first_in_own_process`.
    """
    environment = snapshot()
    path = (folder or cache_folder()) / "checked" / f"{environment.machine_key}.json"
    known = _remembered(path)
    code = _code_of(kernel) + f" torch {environment.torch} triton {environment.triton}"
    if known.get(kernel.id) == code:
        return FirstRun("OK", "")
    first: FirstRun = (run or first_in_own_process)(kernel, case, scheme)
    if first.status == "OK":
        write_whole(path, json.dumps(_remembered(path) | {kernel.id: code}, indent=1) + "\n")
    return first


def _remembered(path: Path) -> dict[str, str]:
    try:
        codes = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}  # no file yet, or a damaged one: the kernels run in their own process again
    return codes if isinstance(codes, dict) else {}


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

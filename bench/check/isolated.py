"""A kernel's first run, in a separate process with a time limit.

A barrier that is never reached blocks the GPU's queue for ever, and one illegal access breaks the CUDA context of the
whole process. The separate process can be killed in both cases.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.calls.selection import pick_device
from rooflab.bench.check.check import check_kernel
from rooflab.bench.processes.child import Child, Died, Stuck, TimedOut, command_for
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import write_whole
from rooflab.bench.records.record import Status
from rooflab.engine.model_files import cache_folder
from rooflab.kernels.registry import Kernel, get_kernel, get_op, load_file
from rooflab.reference.spec import Case, Scheme, get_scheme

TIMEOUT_S = 120.0
"""Compiling and checking one kernel takes 20 s on a slow machine."""
SHARED = Path(inspect.getfile(Kernel)).parent
"""The folder of what all kernels may import: the registry, `_cuda`, configs."""
LAST_LINES = 3
"""How many lines of a failed process's standard error a reason quotes."""


class FirstRun(NamedTuple):
    """The result of a first run."""

    status: Status
    reason: str
    """Why the status is not OK; empty for OK."""


def first_in_own_process(
    op: str,
    kernel: str,
    case: Case,
    scheme: str | Scheme,
    timeout_s: float = TIMEOUT_S,
    *,
    file: Path | None = None,
    device: str | None = None,
    seed: int = 0,
    planted: bool = True,
) -> FirstRun:
    """Checks one kernel on one case (`check.check_kernel`) in a fresh process; `file` registers the kernel.

    It runs on `device`, by default on the GPU if there is one. The status is TIMEOUT without an answer within
    `timeout_s` seconds of the start, and RUNTIME_ERROR if the process ends without an answer; the reason then has the
    signal or the last lines that it wrote. Otherwise status and reason are the check's.
    """
    task = {
        "op": op,
        "kernel": kernel,
        "case": dict(case),
        "scheme": scheme.name if isinstance(scheme, Scheme) else scheme,
        "file": str(file) if file else None,
        "device": device,
        "seed": seed,
        "planted": planted,
    }
    try:
        with Child(command_for(__name__)) as child:
            return FirstRun(*child.ask(task, timeout_s))
    except TimedOut:
        return FirstRun("TIMEOUT", f"no answer within {timeout_s:g} s: a loop or a barrier without an end")
    except Died as died:
        return FirstRun("RUNTIME_ERROR", _why_broken(died))
    except Stuck as stuck:
        return FirstRun("TIMEOUT", str(stuck))


def first_here(kernel: Kernel, case: Case, scheme: str, folder: Path | None = None, run: Any = None) -> FirstRun:
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
    file = None if kernel.fn.__module__.startswith("rooflab.") else Path(inspect.getfile(inspect.unwrap(kernel.fn)))
    first: FirstRun = (run or first_in_own_process)(kernel.op, kernel.name, case, scheme, file=file)
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


def _why_broken(died: Died) -> str:
    lines = " / ".join(died.words.splitlines()[-LAST_LINES:])
    how = f"was ended by {died.signal}" if died.signal else f"ended with {died.how} and no answer"
    return f"its process {how}: {lines}" if lines else f"its process {how}"


def answer(task: Mapping[str, Any]) -> tuple[Status, str]:
    """The child's answer: checks the kernel, and returns status and reason."""
    if task["file"]:
        load_file(Path(task["file"]))
    result = check_kernel(
        get_kernel(task["op"], task["kernel"]),
        get_op(task["op"]),
        Case(**task["case"]),
        get_scheme(task["scheme"]),
        pick_device(task["device"]),
        task["seed"],
        task["planted"],
    )
    return result.status, result.reason

"""A kernel's first run, in a process of its own with a time limit.

A barrier that is never reached hangs the GPU's queue for good, and one illegal access ends the CUDA context of the
whole process: both are met by a process that is started anew, and ended.  What it found comes back as JSON in a file,
because a kernel may print.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.record import Status
from rooflab.engine.model_files import cache_folder
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

TIMEOUT_S = 120.0
"""Importing torch and compiling one kernel takes 20 s on a slow machine."""
SHARED = Path(inspect.getfile(Kernel)).parent
"""What all kernels may import: the registry, `_cuda`, configs."""
LAST_LINES = 3
"""Of what a process that broke off had written to standard error."""


class FirstRun(NamedTuple):
    """What came of it."""

    status: Status
    reason: str
    """Why the status is not OK; empty where it is."""


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
    """The check of one kernel on one case (`check.check_kernel`) in a fresh process; `file` registers the kernel.

    It runs on `device`, by default on the GPU where there is one.

    TIMEOUT where it does not end within `timeout_s` seconds, start included; RUNTIME_ERROR where its process ends
    without an answer, with the signal or the last lines that it wrote; else the check's own status and reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "stderr"
        task = {
            "op": op,
            "kernel": kernel,
            "case": dict(case),
            "scheme": scheme.name if isinstance(scheme, Scheme) else scheme,
            "file": str(file) if file else None,
            "device": device,
            "seed": seed,
            "planted": planted,
            "answer": str(answer),
            "parent": os.getpid(),
        }
        command = [sys.executable, "-m", "rooflab.bench.check.isolated", json.dumps(task)]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return FirstRun("TIMEOUT", f"no answer within {timeout_s:g} s: a loop or a barrier without an end")
            finally:
                _end(process)
        if answer.is_file():
            found = json.loads(answer.read_text())
            return FirstRun(_status(found["status"]), str(found["reason"]))
        return FirstRun("RUNTIME_ERROR", _why_broken(code, log.read_text(errors="replace")))


def first_here(kernel: Kernel, case: Case, scheme: str, folder: Path | None = None, run: Any = None) -> FirstRun:
    """`first_in_own_process` once for a kernel's code on this kind of machine: that it ended well is remembered.

    Code is what lies in the kernel's folder, what all kernels share, and the versions of torch and Triton.  What did
    not end well runs in its own process again the next time.  `run` stands for `first_in_own_process`.
    """
    environment = snapshot()
    path = (folder or cache_folder()) / "checked" / f"{environment.machine_key}.json"
    known = _remembered(path)
    code = _code_of(kernel) + f" torch {environment.torch} triton {environment.triton}"
    if known.get(kernel.id) == code:
        return FirstRun("OK", "")
    file = None if kernel.fn.__module__.startswith("rooflab.") else Path(inspect.getfile(inspect.unwrap(kernel.fn)))
    found: FirstRun = (run or first_in_own_process)(kernel.op, kernel.name, case, scheme, file=file)
    if found.status == "OK":
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_remembered(path) | {kernel.id: code}, indent=1) + "\n")
        part.replace(path)
    return found


def _remembered(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}  # none yet, or cut short: the kernels run in their own process again
    return found if isinstance(found, dict) else {}


def _code_of(kernel: Kernel) -> str:
    """SHA-256 over the files that the kernel may import, or read: its config is in one."""
    own = Path(inspect.getfile(inspect.unwrap(kernel.fn))).parent
    # A kernel from outside may lie among files that are none of its own.
    beside = own.glob("*" if own.parent == SHARED else "*.py")
    digest = hashlib.sha256()
    for file in (*sorted(beside), *sorted(SHARED.glob("*.py"))):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _status(text: str) -> Status:
    for status in get_args(Status):
        if status == text:
            return cast(Status, status)
    raise ValueError(f"status: expected one of {', '.join(get_args(Status))}, got {text!r}")


def _why_broken(code: int, errors: str) -> str:
    lines = " / ".join(errors.strip().splitlines()[-LAST_LINES:])
    if code < 0:
        how = f"its process was ended by {signal.Signals(-code).name}"
    else:
        how = f"its process ended with status {code} and no answer"
    return f"{how}: {lines}" if lines else how


def _end_with(parent: int) -> None:
    """Ends this process when its parent has: a kernel that hangs would go on under all later measurements."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _main(task: dict[str, Any]) -> None:
    """What the process does: checks the kernel, and writes status and reason."""
    from rooflab.bench.calls.selection import pick_device
    from rooflab.bench.check.check import check_kernel
    from rooflab.kernels.registry import get_kernel, get_op, load_file
    from rooflab.reference.spec import get_scheme

    _end_with(task["parent"])
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
    answer = Path(task["answer"])
    part = answer.with_suffix(".part")
    part.write_text(json.dumps({"status": result.status, "reason": result.reason}))
    part.replace(answer)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))

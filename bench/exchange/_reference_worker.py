"""Runs references of definitions, each in a process of its own, on inputs that lie in a folder.

Started by path in Python's isolated mode, and imports nothing of Rooflab: what it runs is somebody else's code.  It
speaks the protocol of `processes/child.py`: `{"folder": ..., "timeout_s": ...}` asks for a job, and the answer is a
text on how the job ended.  A job is a fork of this process, which has torch imported and has touched no device, so that
it begins at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
POLL_S = 0.005


def work(folder: Path) -> None:
    """One job: for each of its workloads a file of outputs, or a text with the fault."""
    job = json.loads((folder / "job.json").read_text())
    device = torch.device(job["device"])
    names: dict[str, Any] = {"__name__": "reference"}
    exec(compile(job["reference"], "reference", "exec"), names)
    for number, scalars in enumerate(job["scalars"]):
        tensors = {name: value.to(device) for name, value in load_file(folder / f"{number}.inputs").items()}
        arguments = [tensors[name] if name in tensors else scalars[name] for name in job["inputs"]]
        torch.manual_seed(job["seed"])
        try:
            with torch.no_grad():
                outputs = named(names["run"](*arguments), job["outputs"])
        except FAULTS as error:
            (folder / f"{number}.fault").write_text(f"{type(error).__name__}: {error}")
            continue
        partial = folder / f"{number}.partial"
        save_file(outputs, partial)
        partial.rename(folder / f"{number}.outputs")


def named(result: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """What `run` returned, by output.  Raises `ValueError` on too few."""
    if isinstance(result, dict):
        values = [result[name] for name in names]
    else:
        values = list(result) if isinstance(result, tuple | list) else [result]
    if len(values) < len(names):
        raise ValueError(f"run returned {len(values)} values, the definition has {len(names)} outputs")
    return {name: torch.as_tensor(value).cpu().contiguous() for name, value in zip(names, values, strict=False)}


def apart(folder: Path, timeout_s: float) -> str:
    """Does a job in a process of its own, and says how that ended: nothing, or why it did not end well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            os.chdir(folder)
            null = os.open(os.devnull, os.O_RDWR)
            log = os.open("stderr", os.O_WRONLY | os.O_CREAT, 0o600)
            for target, source in ((0, null), (1, null), (2, log)):
                os.dup2(source, target)
            work(folder)
            status = 0
        except BaseException as error:  # whatever ends the job must not come back into the loop of jobs
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    try:
        os.killpg(child, signal.SIGKILL)  # it, and what it started and left behind
    except (ProcessLookupError, PermissionError):
        pass
    if not ended:
        os.waitpid(child, 0)
        return f"TIMEOUT: its reference took more than {timeout_s:g} s"
    code = os.waitstatus_to_exitcode(status)
    words = (folder / "stderr").read_text(errors="replace").strip() if (folder / "stderr").exists() else ""
    return "" if code == 0 else f"its reference ended with status {code}: {words.splitlines()[-1] if words else ''}"


def serve() -> None:
    """Works through the jobs on standard input until it ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(apart(Path(job["folder"]), job["timeout_s"])), flush=True)


if __name__ == "__main__":
    serve()

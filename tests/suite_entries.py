"""Entries for tests of the suite's runner: called by name in its processes."""

import json
import os
import subprocess
import sys
import time

from rooflab.bench.suite.entries import Outcome
from rooflab.bench.suite.running import ContextBroken, Running


def identify(context):
    """A machine that is always the same one, and that needs no torch to be asked."""
    environment = {"machine_key": "machine-1", "commit": "abc"}
    return Outcome(figures={"environment": environment, "ceilings": "TEST_CEILINGS" in os.environ})


def fine(context, note=""):
    """Leaves its process's number."""
    with (context.out / "ran.txt").open("a") as file:
        file.write(f"{context.entry} {os.getpid()}\n")
    return Outcome(figures={"pid": os.getpid(), "seconds": context.seconds, "infinite": float("inf")}, reason=note)


def slow(context, seconds):
    """Takes its time, with a child that leads a session as a first check's process does, and says so at once."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (context.out / "slow.json").write_text(json.dumps({"pid": os.getpid(), "child": child.pid}))
    time.sleep(seconds)
    child.kill()
    return Outcome()


def dies(context):
    """Ends its process as a device fault ends it."""
    print("last words", file=sys.stderr)
    os.abort()


def raises(context):
    """Fails in a way that is known."""
    raise ValueError("x: expected a number")


def first(context):
    """Excludes one kernel and verifies another."""
    return Outcome(excluded={"gemm/naive": "RUNTIME_ERROR: it wrote out of bounds"}, verified=("gemm/library",))


def sees(context):
    """Says what it was told."""
    return Outcome(figures={"excluded": dict(context.excluded), "verified": context.verified})


def kernels(context, how, suspects=1):
    """Runs three kernels and leaves a line of each, as `check` does; the second ends as `how` says."""
    now = Running(context.entry, files=("run.jsonl",))
    path = context.out / "run.jsonl"
    done = path.read_text().split() if context.earlier else []
    for name in ("op/a", "op/b", "op/c"):
        if name in done or name in context.excluded:
            continue
        now.note(context.out, [name, "op/other"][:suspects])
        if name == "op/b" and how == "dies":
            os.abort()
        if name == "op/b" and how == "breaks":
            raise ContextBroken("CUDA error: an illegal memory access was encountered")
        if name == "op/b" and how == "hangs":
            time.sleep(600)
        with path.open("a") as file:
            file.write(f"{name}\n")
    return Outcome(files=("run.jsonl",), figures={"ran": path.read_text().split(), "pid": os.getpid()})


def cut(context):
    """Has time for a part at a time."""
    path = context.out / "run.jsonl"
    done = path.read_text().split() if context.earlier else []
    path.write_text("\n".join([*done, "part"]))
    return Outcome("PARTIAL" if len(done) < 2 else "DONE", files=("run.jsonl",), figures={"parts": len(done) + 1})


def wedged(context):
    """A device that no longer answers."""
    return Outcome("FAILED", "no answer")

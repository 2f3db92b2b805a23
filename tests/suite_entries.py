"""Entries for tests of the suite's runner: called by name in its processes."""

import json
import os
import subprocess
import sys
import time

from rooflab.bench.suite.entries import Outcome


def identify(context):
    """A machine that is always the same one, and that needs no torch to be asked."""
    return Outcome(figures={"environment": {"machine_key": "machine-1", "commit": "abc"}})


def fine(context, note=""):
    """Leaves its process's number."""
    with (context.out / "ran.txt").open("a") as file:
        file.write(f"{context.entry} {os.getpid()}\n")
    return Outcome(figures={"pid": os.getpid(), "seconds": context.seconds, "infinite": float("inf")}, reason=note)


def slow(context, seconds):
    """Takes its time, with a child of its own, and says so at once."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
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


def wedged(context):
    """A device that no longer answers."""
    return Outcome("FAILED", "no answer")

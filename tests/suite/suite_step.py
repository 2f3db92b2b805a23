"""A step of the suite's tests, as a command: `suite_step.py HOW --out FOLDER`.  It imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rooflab.bench.core.running import ContextBroken, Running
from rooflab.bench.suite.entries import EntryOutcome
from rooflab.bench.suite.step import context_of, end, parser


def environment(context):
    """A machine that says what the variables say, and that a fault of an earlier step may have broken for good."""
    if (context.run / "wedged").exists():
        return EntryOutcome("FAILED", "no answer")
    found = {"machine_key": os.environ.get("TEST_KEY", "h100-16c"), "tree": "t", "commit": "abc"}
    found["gpu"] = {"name": "NVIDIA H100 80GB HBM3", "uuid": os.environ.get("TEST_UUID", "GPU-1")}
    (context.run / "environment.json").write_text(json.dumps(found))
    return fine(context)


def fine(context):
    """Leaves its process's number."""
    with (context.run / "ran.txt").open("a") as file:
        file.write(f"{context.out.name} {os.getpid()}\n")
    return EntryOutcome(figures={"pid": os.getpid(), "seconds": context.seconds, "infinite": float("inf")})


def slow(context):
    """Takes its time, with a child that leads a session as a first check's process does, and says so at once."""
    fine(context)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (context.run / "slow.json").write_text(json.dumps({"pid": os.getpid(), "child": child.pid}))
    time.sleep(0 if os.environ.get("TEST_FAST") else 600)
    child.kill()
    return EntryOutcome()


def waits(context):
    """Ends when the slow step has begun."""
    while not (context.run / "slow.json").exists():
        time.sleep(0.05)
    return EntryOutcome()


def dies(context):
    """Ends its process as a device fault ends it."""
    print("last words", file=sys.stderr, flush=True)
    os.abort()


def wedges(context):
    """Leaves a device that no longer answers."""
    (context.run / "wedged").touch()
    os.abort()


def raises(context):
    """Fails in a way that nobody expected."""
    raise LookupError("no such thing")


def refuses(context):
    """Ends as a command with bad input."""
    print("rooflab: x: expected a number", file=sys.stderr)
    raise SystemExit(2)


def first(context):
    """Excludes one kernel, as a first check that found a fault."""
    return EntryOutcome(excluded={"gemm/naive": "RUNTIME_ERROR: it wrote out of bounds"})


def sees(context):
    """Says which kernels it must not run."""
    return EntryOutcome(figures={"excluded": json.loads(Path(os.environ["ROOFLAB_EXCLUDE"]).read_text())})


def lies(context):
    """A command that says that all is well, beside records that do not."""
    one = {"op": "op", "case_id": "M=1", "scheme": "bf16", "reason": "c: off"}
    rows = [{**one, "kernel": "b", "status": "INCORRECT"}, {**one, "kernel": "c", "status": "INVALID"}]
    (context.out / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"op": "cut')
    raise SystemExit(0)


def cut(context):
    """Has time for a part at a time."""
    path = context.out / "parts.txt"
    parts = len(path.read_text().split()) if path.exists() else 0
    path.write_text("part\n" * (parts + 1))
    return EntryOutcome("PARTIAL" if parts < 2 else "DONE", figures={"parts": parts + 1})


def kernels(how, suspects=1):
    """Runs three kernels and leaves a line of each, as a measurement does; the second ends as `how` says."""

    def run(context):
        path, lost = context.out / "run.txt", json.loads(Path(os.environ["ROOFLAB_EXCLUDE"]).read_text())
        done = path.read_text().split() if path.exists() else []
        for name in ("op/a", "op/b", "op/c"):
            if name in done or name in lost:
                continue
            Running.note([name, "op/other"][:suspects])
            if name == "op/b" and how == "dies":
                os.abort()
            if name == "op/b" and how == "breaks":
                raise ContextBroken("CUDA error: an illegal memory access was encountered")
            if name == "op/b" and how == "hangs":
                time.sleep(600)
            with path.open("a") as file:
                file.write(f"{name}\n")
        Running.note(())
        return EntryOutcome(figures={"ran": path.read_text().split(), "pid": os.getpid()})

    return run


STEPS = {
    step.__name__: step
    for step in (environment, fine, slow, waits, dies, wedges, raises, refuses, first, sees, lies, cut)
}
STEPS |= {f"kernel {how}": kernels(how) for how in ("dies", "breaks", "hangs")} | {"two die": kernels("dies", 2)}

if __name__ == "__main__":
    options = parser("a step")
    options.add_argument("how", choices=STEPS)
    options.add_argument("--probe", action="store_true")
    told = options.parse_args()
    end(context_of(told), STEPS[told.how])

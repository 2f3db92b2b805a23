"""The process in which entries run: a request a line on standard input, an answer a line on the output.

On a GPU it serves one entry and ends, so that a poisoned context ends with it.  It imports the modules named on its
command line before it is asked, and touches no device until then: the runner starts the next one while the last entry
still works.  When the runner is gone
its input ends, and the process takes itself and everything that it started away.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from rooflab.bench.processes.child import descendants, kill_all
from rooflab.bench.records.plain import plain
from rooflab.bench.suite.calls import find
from rooflab.bench.suite.entries import Context, Outcome
from rooflab.bench.suite.running import ContextBroken


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The `Outcome` of a request, as JSON.  What the entry raises is its failure."""
    values = request["context"]
    verified = values["verified"]
    typed = {"out": Path(values["out"]), "earlier": tuple(values["earlier"])}
    context = Context(**{**values, **typed, "verified": None if verified is None else tuple(verified)})
    try:
        outcome = find(request["call"])(context, **request["arguments"])
    except ContextBroken as broken:
        outcome = Outcome("FAILED", str(broken), again=True)
    except known_errors() as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno} in {where.name}"
        traceback.print_exc()
        outcome = Outcome("FAILED", f"{type(error).__name__}: {error} ({place})")
    return asdict(outcome)


def known_errors() -> tuple[type[Exception], ...]:
    """What an entry is known to raise: what kernels do, and a process or a file that is not there."""
    from rooflab.bench.check import trial

    return trial.known_errors()


def identify(context: Context) -> Outcome:
    """What a run must share with the one that it goes on with; the runner asks before the first entry."""
    from rooflab.bench.records.environment import snapshot

    found = snapshot()
    return Outcome(figures={"environment": found.to_dict()})


def _read(lines: IO[str], requests: queue.Queue[str | None], idle: threading.Event) -> None:
    for line in lines:
        idle.clear()
        requests.put(line)
    if not idle.is_set():
        # The runner died under an entry: its session, which is this process's own, goes with it, and so do the
        # processes of first checks, which lead sessions of their own.
        kill_all(descendants(os.getpid()))
        os.killpg(0, signal.SIGKILL)
    requests.put(None)


def serve(lines: IO[str], answers: IO[str]) -> None:
    """Answers requests until the input ends."""
    requests: queue.Queue[str | None] = queue.Queue()
    idle = threading.Event()
    idle.set()
    threading.Thread(target=_read, args=(lines, requests, idle), daemon=True).start()
    answers.write("ready\n")
    answers.flush()
    while (line := requests.get()) is not None:
        text = json.dumps(plain(answer(json.loads(line))), allow_nan=False)
        idle.set()
        answers.write(text + "\n")
        answers.flush()


if __name__ == "__main__":
    # Answers get a descriptor of their own: what an entry or a compiler prints must not mix with them.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    serve(sys.stdin, channel)

"""The runner's end of a process in which entries run: asked, waited for so long and no longer, and ended whole."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rooflab.bench.processes.child import kill_whole
from rooflab.bench.suite.entries import Context, Outcome
from rooflab.bench.suite.state import outcome_of

END_S = 10.0
"""A process that is still there this long after SIGKILL waits in the driver."""
START_LIMIT_S = 120.0


class Ended(Exception):
    """The process ended, or was ended, before it answered; the text says which."""


class Process:
    """One process in a session of its own, whose standard error goes to `log`; it imports `modules` at once."""

    def __init__(self, log: Path, environment: Mapping[str, str], modules: Sequence[str] = ()):
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("ab")
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "rooflab.bench.suite.worker", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )
        self._ready = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._popen.stdout is not None, "Popen was given PIPE"
        for line in self._popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def run(self, call: str, arguments: Mapping[str, Any], context: Context, limit_s: float) -> Outcome:
        """What `call` says.  Raises `Ended` where the process dies, or is ended after `limit_s`."""
        if not self._ready:
            self._line(START_LIMIT_S, "started")
            self._ready = True
        told = {key: value for key, value in asdict(context).items() if key != "began"} | {"out": str(context.out)}
        assert self._popen.stdin is not None, "Popen was given PIPE"
        try:
            self._popen.stdin.write(json.dumps({"call": call, "arguments": dict(arguments), "context": told}) + "\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead, which reading its answer finds out
        return outcome_of(json.loads(self._line(limit_s, "answered")))

    def _line(self, limit_s: float, what: str) -> str:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self.stop()
            raise Ended(f"TIMEOUT: it had not {what} after {limit_s:.0f} s and was ended") from None
        if line is None:
            status = self.stop()
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            raise Ended(f"its process ended with {how} before it {what}")
        return line

    def stop(self) -> int:
        """Ends the process and everything that it started; returns its status."""
        kill_whole(self._popen.pid)
        try:
            status = self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            raise Ended("TIMEOUT: its process does not end, and holds the device") from None
        for pipe in (self._popen.stdin, self._popen.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that it did not live to read
                    pipe.close()
        return status

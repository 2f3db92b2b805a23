"""The processes that compile: started at their first request, kept for the next, ended with this one."""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

TIMEOUT_S = 300.0
"""A compile takes about half a second; one that takes this long will not end."""
COMPILER = "rooflab.bench.compile.worker"
_TREE_WORKER = Path(__file__).with_name("_tree_worker.py")


class CompileFailure(RuntimeError):
    """A kernel did not compile; the text is the compiler's or the launcher's."""

    def __init__(self, text: str, refused: bool = False):
        super().__init__(text)
        self.refused = refused
        """Whether there is no such kernel, or it says that it does not take the case."""


class Worker:
    """One compiling process, of this tree's kernels or of those in the folder `tree`; or another `module` that serves.

    None of them interprets Triton's kernels, which this process may.
    """

    def __init__(self, tree: Path | None = None, module: str = COMPILER, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self.log = tempfile.TemporaryFile()  # as long-lived as the process that writes it
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # -P: the folder of a script must not be where imports look first.
        own = ["-m", module] if tree is None else ["-P", str(_TREE_WORKER), str(tree)]
        self.process = subprocess.Popen(
            [sys.executable, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            text=True,
        )
        atexit.register(self.stop)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer.  Raises `CompileFailure` where it dies or takes longer than `timeout_s`."""
        timer = threading.Timer(TIMEOUT_S if self.timeout_s is None else self.timeout_s, self.process.kill)
        timer.start()
        try:
            _pipe(self.process.stdin).write(json.dumps(request) + "\n")
            _pipe(self.process.stdin).flush()
            line = _pipe(self.process.stdout).readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        status = self.process.wait()
        self.log.seek(0)
        tail = self.log.read().decode(errors="replace").strip()[-2000:]
        raise CompileFailure(f"the process ended with status {status}: {tail}")

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            _pipe(pipe).close()
        self.log.close()
        atexit.unregister(self.stop)


class Workers:
    """As many processes as there are cores, all of one tree."""

    def __init__(self, tree: Path | None = None, module: str = COMPILER, timeout_s: float | None = None):
        self._start = partial(Worker, tree, module, timeout_s)
        self.idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        self.threads = ThreadPoolExecutor(min(8, _cores()), thread_name_prefix="compile")

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One answer, from an idle process or a new one.  Raises `CompileFailure` where the process ends."""
        try:
            worker = self.idle.get_nowait()
        except queue.Empty:
            worker = self._start()
        try:
            found = worker.ask(request)
        except CompileFailure:
            worker.stop()
            raise
        self.idle.put(worker)
        return found

    def ask_all(self, requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answers in the order of the requests, worked on by all processes; that of one whose process ended is
        `{"error": text, "where": "", "refused": False}`."""
        return list(self.threads.map(self._attempt, requests))

    def _attempt(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.ask(request)
        except CompileFailure as failure:
            return {"error": str(failure), "where": "", "refused": False}

    def stop(self) -> None:
        """Ends every idle process."""
        self.threads.shutdown()
        while not self.idle.empty():
            self.idle.get_nowait().stop()


@cache
def own_workers() -> Workers:
    """Those of this tree's kernels."""
    return Workers()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "Popen was given PIPE"
    return pipe

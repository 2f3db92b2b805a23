"""A child that is a fork of this process: it has its modules already, and starts in milliseconds instead of seconds."""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable
from subprocess import TimeoutExpired
from typing import Any, NoReturn

from rooflab.bench.calls.clock import time
from rooflab.bench.processes.boot import serve
from rooflab.bench.processes.child import Child


class Forked(Child):
    """A `Child` whose requests `answer` answers.

    Only for a process whose libraries have not started threads, and which does not use CUDA.  The fork has none of its
    open files.
    """

    def __init__(self, answer: Callable[[Any], Any]):
        self._log, self._log_start = tempfile.TemporaryFile(), 0
        self._lines: queue.Queue[str] = queue.Queue()
        self._begin(_Process(answer, self._log.fileno()))


class _Process:
    """What `Child` uses of `subprocess.Popen`."""

    def __init__(self, answer: Callable[[Any], Any], log: int):
        ours, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for the thread that reads requests
            self.pid = os.fork()
        if self.pid == 0:
            _be_the_child(answer, log, theirs.fileno())
        theirs.close()
        self.stdin, self.stdout = ours.makefile("w"), ours.makefile("r")
        ours.close()
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float) -> int:
        ends = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > ends:
                raise TimeoutExpired("a fork", timeout)
            time.sleep(0.001)
        return status


def _be_the_child(answer: Callable[[Any], Any], log: int, requests: int) -> NoReturn:
    """Serves on the descriptor `requests`, with `log` for standard output and error, and with no other open file."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(requests, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        with os.fdopen(3, "r", closefd=False) as lines, os.fdopen(3, "w", closefd=False) as answers:
            serve(answer, lines, answers)
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)

"""Manages child processes: starts them, sends requests, limits the time, and ends them with all descendants.

The child's program is `boot.py`.  Requests and answers are lines of JSON.  A child that does not answer raises
`ChildFailed`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import psutil

from rooflab.bench.base.git import ROOT
from rooflab.bench.base.plain import Json
from rooflab.bench.base.system_time import time
from rooflab.kernels._folders import check_caches

BOOT_FILE = Path(__file__).with_name("boot.py")
START_LIMIT_S = 180.0
"""Longest time for a child to import torch and the kernels, on a busy machine."""
LOOK_S = 0.25
"""Seconds between two calls of the caller's `hangs`, which tells whether the child hangs."""
CPU_RUN_LIMIT_S = 1800.0
"""Longest time of one run of a kernel on a CPU.  A large case in Triton's interpreter takes long."""
GPU_RUN_LIMIT_S = 120.0
"""Longest time of one run of a compiled kernel on a GPU.  A longer run hangs, and blocks the GPU."""
KILL_LIMIT_S = 10.0
"""A process that still exists this many seconds after SIGKILL hangs in the driver."""


class ChildFailed(RuntimeError):
    """A child gave no answer: it took too long (`late`), it ended (`died`), or it still exists after SIGKILL."""

    limit_s: float | None = None
    """The limit in seconds after which the child was ended; None if the child ended by itself."""
    status: int | None = None
    """The exit status of the child, as in `subprocess`: a negative status is minus the number of the signal."""
    words = ""
    """The end of the child's standard error."""

    @classmethod
    def late(cls, limit_s: float) -> ChildFailed:
        child_failure = cls(f"took longer than {limit_s:.0f} s, and was ended")
        child_failure.limit_s = limit_s
        return child_failure

    @classmethod
    def died(cls, status: int, words: str) -> ChildFailed:
        log_lines = [log_line.strip() for log_line in words.splitlines() if log_line.strip()]
        file_line = next((f" ({log_line})" for log_line in reversed(log_lines) if log_line.startswith('File "')), "")
        last_line = log_lines[-1][-500:] + file_line if log_lines else "it said nothing"
        child_failure = cls()
        child_failure.status, child_failure.words = status, words
        child_failure.args = (f"its process ended with {child_failure.how}: {last_line}",)
        return child_failure

    @property
    def how(self) -> str:
        """Returns how the child ended, such as `signal SIGSEGV`."""
        status = self.status or 0
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def command_for(modules: Sequence[str], tree: Path | None = None) -> list[str]:
    """Returns the command line of a child process that answers requests.  The child imports `modules`.  The last of
    these modules has the function `answer`, which gets each request.

    With the folder `tree`, the child imports kernels from `tree`, and `bench` from the running program's folder."""
    # -P: imports must not look into the script's folder first.
    return [sys.executable, "-P", str(BOOT_FILE), *(("--tree", str(tree), str(ROOT)) if tree else ()), *modules]


class Child:
    """A child process that answers requests.  Raises `ValueError` if its compile caches cannot be written to.

    The child gets this process's environment variables, changed by `environment`; None removes a variable.  By default
    the child leads its own session, so Ctrl-C does not end it.  Standard error goes to the file `log`, or else into the
    text of `ChildFailed`.  `command_for` explains `modules` and `tree`."""

    def __init__(
        self,
        *modules: str,
        environment: Mapping[str, str | None] | None = None,
        tree: Path | None = None,
        log: Path | None = None,
        folder: Path | None = None,
        own_session: bool = True,
    ):
        new_environment = {**os.environ, **(environment or {})}
        child_variables = {name: value for name, value in new_environment.items() if value is not None}
        check_caches(child_variables)
        self._log = tempfile.TemporaryFile() if log is None else log.open("ab+")  # noqa: SIM115  open while the child is
        self._log_start = self._log.seek(0, os.SEEK_END)
        self._lines: queue.Queue[str] = queue.Queue()
        self._popen = subprocess.Popen(
            command_for(modules, tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=child_variables,
            cwd=folder,
            text=True,
            start_new_session=own_session,
        )
        self.only_for = ""
        """`Pool.child` gives this child only to users whose name begins with this text."""
        self._ready = False
        self._status: int | None = None
        threading.Thread(target=self._read, daemon=True).start()

    @staticmethod
    def run(
        command: Sequence[str], timeout_s: float, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Runs `command`, returns its output and status, and ends all processes that the command started.

        Ends the command and raises `subprocess.TimeoutExpired` if the command takes longer than `timeout_s`.
        """
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environment),
            start_new_session=True,
        ) as process:
            try:
                child_output, error_output = process.communicate(timeout=timeout_s)
            finally:
                # Otherwise a child that hangs in the driver would keep the pipes and the card after its parent's death.
                kill_whole(process.pid)
        return subprocess.CompletedProcess(command, process.returncode, child_output, error_output)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._popen.stdout is not None, "Popen was given PIPE"
        with self._popen.stdout as child_output:
            for output_line in child_output:
                self._lines.put(output_line)
        self._lines.put("")

    @property
    def ended(self) -> bool:
        """Whether `stop` has ended the child."""
        return self._status is not None

    def ask(self, request: Json, limit_s: float, hangs: Callable[[], bool] = lambda: False) -> Json:
        """Sends a request, and returns the answer.

        Raises `ChildFailed` if no answer comes within `limit_s` seconds (a start may take `START_LIMIT_S` more), if the
        child ends, or if `hangs`, called every `LOOK_S` seconds, returns True.  The error ends all its processes."""
        self._send(request, hangs)
        return json.loads(self._line(limit_s, hangs))

    def stream(self, request: Json, limit_s: float, hangs: Callable[[], bool] = lambda: False) -> Iterator[Json]:
        """Yields several answers to a request.  Each answer may take `limit_s` seconds.  Raises the errors of `ask`."""
        self._send(request, hangs)
        while (answer := json.loads(self._line(limit_s, hangs))) is not None:
            yield answer

    def start(self, hangs: Callable[[], bool] = lambda: False) -> None:
        """Waits until the child has imported its modules.  Raises the same exceptions as `ask`."""
        if not self._ready:
            self._line(START_LIMIT_S, hangs)
            self._ready = True

    def _send(self, request: Json, hangs: Callable[[], bool] = lambda: False) -> None:
        self.start(hangs)
        self.post(request)

    def post(self, request: Json) -> None:
        """Sends a request without waiting for an answer.  A later `stop` also ends the request, if it still runs."""
        assert self._popen.stdin is not None, "Popen was given PIPE"
        with suppress(BrokenPipeError):  # the child is dead; reading its answer reports it
            self._popen.stdin.write(json.dumps(request) + "\n")
            self._popen.stdin.flush()

    def _line(self, limit_s: float, hangs: Callable[[], bool] = lambda: False) -> str:
        start, output_line = time.monotonic(), None
        while output_line is None:
            remaining_s = start + limit_s - time.monotonic()
            try:
                output_line = self._lines.get(timeout=max(0.0, min(LOOK_S, remaining_s)))
            except queue.Empty:
                if remaining_s > LOOK_S and not hangs():
                    continue
                if self._popen.poll() is None:
                    self.stop()
                    raise ChildFailed.late(limit_s if remaining_s <= LOOK_S else time.monotonic() - start) from None
                output_line = ""  # the child is dead, and a process that it started holds its output open
        if output_line.endswith("\n"):
            return output_line
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(KILL_LIMIT_S)  # before `stop`, because a kill would change the status
        self._log.seek(self._log_start)
        log_text = self._log.read().decode(errors="replace").strip()
        raise ChildFailed.died(self.stop(), log_text[-2000:])

    def stop(self) -> int:
        """Ends the process and its descendants.  Returns the exit status.  Raises `ChildFailed` if it still runs."""
        if self._status is None:
            kill_whole(self._popen.pid)
            try:
                self._status = self._popen.wait(KILL_LIMIT_S)
            except subprocess.TimeoutExpired:
                raise ChildFailed("its process does not end, and holds the device") from None
            self._log.close()
            assert self._popen.stdin is not None, "Popen was given PIPE"
            with suppress(BrokenPipeError):  # the child ended before it read a request
                self._popen.stdin.close()
        return self._status


def cores() -> int:
    """Returns the number of cores that this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class Pool:
    """A pool of at most `size` children (by default one per core, at most 8), which are started on demand.

    Ctrl-C also ends the children.  Otherwise this process's threads would still wait for answers of the children."""

    def __init__(
        self,
        *modules: str,
        limit_s: float,
        environment: Mapping[str, str | None] | None = None,
        size: int | None = None,
        tree: Path | None = None,
    ):
        self.limit_s = limit_s
        self.size = size or cores()
        self.idle: queue.LifoQueue[Child] = queue.LifoQueue()
        self.threads = ThreadPoolExecutor(self.size, thread_name_prefix="child")
        self._new = partial(Child, *modules, environment=environment, tree=tree, own_session=False)

    @staticmethod
    @cache
    def of_kernels(one_thread: bool) -> Pool:
        """Returns the pool that runs kernels, kept until the program ends.  `one_thread`: each child has one thread."""
        environment, limit_s = ({"OMP_NUM_THREADS": "1"}, CPU_RUN_LIMIT_S) if one_thread else ({}, GPU_RUN_LIMIT_S)
        return Pool("rooflab.bench.core.outside", environment=environment, limit_s=limit_s)

    @contextmanager
    def child(self, user: str = "") -> Iterator[Child]:
        """Yields a child process that no other caller uses during the `with` block.  The child is idle or new.

        Some children are reserved for one user.  An idle child that is reserved for another `user` is ended.  A child
        that the caller has ended is not used again."""
        try:
            while not user.startswith((child := self.idle.get_nowait()).only_for):
                child.stop()
        except queue.Empty:
            child = self._new()
        try:
            yield child
        finally:
            if not child.ended:
                self.idle.put(child)

    def begin(self, count: int = 1) -> None:
        """Starts children without waiting, so that the children import torch while this process imports torch too."""
        for _ in range(count):
            self.idle.put(self._new())

    def start(self, count: int) -> None:
        """Waits until `count` children can answer.  A child that fails to start is skipped."""
        with ExitStack() as exit_stack:
            for child in [exit_stack.enter_context(self.child()) for _ in range(min(count, self.size))]:
                with suppress(ChildFailed):
                    child.start()

    def ask(self, request: Json, hangs: Callable[[], bool] = lambda: False) -> Json:
        """Returns the answer of an idle or a new child.  Raises the same exceptions as `Child.ask`."""
        with self.child() as child:
            return child.ask(request, self.limit_s, hangs)

    def ask_all(self, requests: Iterable[Json]) -> Iterator[Json]:
        """Asks children in parallel, and yields answers in the order of the requests, or `ChildFailed` objects."""
        return self.threads.map(self._attempt, requests)

    def _attempt(self, request: Json) -> Json:
        try:
            return self.ask(request)
        except ChildFailed as failed:
            return failed

    def stop(self) -> None:
        """Drops requests that were not sent yet, waits for the other answers, and ends every child."""
        self.threads.shutdown(cancel_futures=True)
        while not self.idle.empty():
            self.idle.get_nowait().stop()


def kill_whole(pid: int) -> None:
    """Kills a process, the process group that it leads, and all its descendants.

    A descendant may lead its own session.  The kill of the group does not reach such a descendant."""
    process_tree = family(pid)  # before the kill: the children of a dead process cannot be found
    with suppress(ProcessLookupError):  # it leads no group, or the group is gone
        os.killpg(pid, signal.SIGKILL)
    kill_all(process_tree)


def family(pid: int) -> list[psutil.Process]:
    """Returns the process `pid` and all its descendants; empty if the process has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kills each process that still exists.  psutil never kills a new process that has the pid of an old process."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended in the meantime
            process.kill()

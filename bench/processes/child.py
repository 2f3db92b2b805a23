"""Processes that are ended whole: with everything that they started, in sessions of its own too."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

import psutil


def kill_whole(pid: int) -> None:
    """Kills the process group that `pid` leads, and every process that `pid` and its children started.

    A group alone is not enough: what runs a kernel for the first time leads a session of its own.
    """
    found = descendants(pid)  # first: the children of a dead process are nobody's
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it and its group are gone already
    kill_all(found)


def descendants(pid: int) -> list[psutil.Process]:
    """The children of `pid`, and theirs; none where it is gone."""
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kills each that is still there; psutil does not take a new process of the same number for it."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass  # it ended in the meantime


def run_whole(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What `command` printed and its status; what it started ends with it.

    Raises `subprocess.TimeoutExpired` where it does not end in time; it is then ended.
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
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            # A child that hangs in the driver would hold the pipes, and the card, after its parent was killed.
            kill_whole(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)

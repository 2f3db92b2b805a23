"""Measures how long this process's threads waited for a core.  Times differ between a busy and an idle machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

BUSY_SHARE = 0.1
"""A thread counts as working if it ran for more than this fraction of the busiest thread's running time."""
_TASKS = Path("/proc/self/task")


def run_times() -> dict[int, tuple[int, int]]:
    """Returns two times in nanoseconds for each thread: how long it ran, and how long it waited for a core.  Leaves out
    threads that have ended.  Returns an empty dict if the system does not report these times."""
    times = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(OSError):
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
            times[int(task.name)] = (ran, waited)
    return times


def waiting_since(began: Mapping[int, tuple[int, int]]) -> float | None:
    """Returns the ratio of waiting time to running time since `began`, over this process's working threads.

    `began` is a result of `run_times`.  Returns None if the system does not report these times.  A thread that hardly
    ran does not count as working.  For example, a library's helper thread waits while other threads use all cores."""
    changes = [np.subtract(current_times, began.get(thread, (0, 0))) for thread, current_times in run_times().items()]
    peak = max((ran for ran, _ in changes), default=0)
    ran, waited = np.sum([change for change in changes if change[0] >= BUSY_SHARE * peak], axis=0) if peak else (0, 0)
    return float(waited / ran) if ran > 0 else None

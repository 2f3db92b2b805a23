"""Measures how long this process's threads waited for a core.  Times differ between a busy and a quiet machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

BUSY_SHARE = 0.1
"""A thread counts as working if it ran for more than this fraction of the busiest thread's running time."""
_TASKS = Path("/proc/self/task")


def run_times() -> dict[int, tuple[int, int]]:
    """Returns for each thread the nanoseconds that it ran and that it waited for a core.  Leaves out threads that have
    ended.  Returns no threads if the system has no such counts."""
    times = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(OSError):
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
            times[int(task.name)] = (ran, waited)
    return times


def waiting_since(began: Mapping[int, tuple[int, int]]) -> float | None:
    """Returns the ratio of waiting time to running time of this process's working threads since `began`, a result of
    `run_times`.  Returns None if the system has no such counts.

    A thread that hardly ran did not work: a library's helper thread waits for as long as the others use all cores.
    """
    changes = [np.subtract(now, began.get(thread, (0, 0))) for thread, now in run_times().items()]
    most = max((ran for ran, _ in changes), default=0)
    ran, waited = np.sum([change for change in changes if change[0] >= BUSY_SHARE * most], axis=0) if most else (0, 0)
    return float(waited / ran) if ran > 0 else None

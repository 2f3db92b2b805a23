"""The time that this process's threads waited for a core: a busy machine gives other times than a quiet one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

BUSY_SHARE = 0.1
"""A thread took part in the work if it ran for more than this fraction of the busiest thread's time."""
_TASKS = Path("/proc/self/task")


def run_times() -> dict[int, tuple[int, int]]:
    """Returns nanoseconds on a processor and waiting for a processor, by thread; threads that have ended are left out,
    and all threads if the system has no such counts."""
    times = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(OSError):
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
            times[int(task.name)] = (ran, waited)
    return times


def waiting_since(began: Mapping[int, tuple[int, int]]) -> float | None:
    """Returns waiting time over running time of this process's working threads since `began`, a result of `run_times`;
    None if the system has no such counts.

    A thread that hardly ran did not work: a library's helper waits for as long as the others use all cores.
    """
    changes = [np.subtract(now, began.get(thread, (0, 0))) for thread, now in run_times().items()]
    most = max((ran for ran, _ in changes), default=0)
    ran, waited = np.sum([change for change in changes if change[0] >= BUSY_SHARE * most], axis=0) if most else (0, 0)
    return float(waited / ran) if ran > 0 else None


def processor_time() -> tuple[float, float, float]:
    """Returns seconds that all processors worked, seconds that they existed, and seconds of this process.  Time that
    another guest of the host took counts as work."""
    now = psutil.cpu_times()
    there = sum(now[:8])  # the next times, of the host's guests, are in `user` too
    return there - now.idle - getattr(now, "iowait", 0.0), there, time.process_time()


def others_since(began: tuple[float, float, float]) -> float | None:
    """Returns the share of all processors' time that other processes took since `began`, a result of `processor_time`;
    None if no time has passed on its clock."""
    worked, there, ours = np.subtract(processor_time(), began)
    return max(0.0, float((worked - ours) / there)) if there > 0 else None

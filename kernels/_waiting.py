"""How long this process's threads waited for a core: times of a busy machine are not those of a quiet one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

BUSY_SHARE = 0.1
"""A thread took part in work if it ran for more than this share of the time of the thread that it is compared with."""
_TASKS = Path("/proc/self/task")


def run_times() -> dict[int, tuple[int, int]]:
    """Nanoseconds on a processor and waiting for one, by thread; threads that have ended are left out, and all of them
    if the system does not tell."""
    times = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(OSError):
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
            times[int(task.name)] = (ran, waited)
    return times


def waiting_since(began: Mapping[int, tuple[int, int]]) -> float | None:
    """The time that this process's working threads waited for a processor since `began`, which is of `run_times`, over
    the time that they ran; None if the system does not tell.

    A thread that hardly ran did not work: a library's helper waits for as long as the others use all cores.
    """
    changes = [np.subtract(now, began.get(thread, (0, 0))) for thread, now in run_times().items()]
    most = max((ran for ran, _ in changes), default=0)
    ran, waited = np.sum([change for change in changes if change[0] >= BUSY_SHARE * most], axis=0) if most else (0, 0)
    return float(waited / ran) if ran > 0 else None


def processor_time() -> tuple[float, float, float]:
    """Seconds that all processors worked, seconds that they were there, and seconds of this process.  Time that another
    guest of the host took counts as work."""
    now = psutil.cpu_times()
    there = sum(now[:8])  # those of the host's guests, which follow, are in `user` too
    return there - now.idle - getattr(now, "iowait", 0.0), there, time.process_time()


def others_since(began: tuple[float, float, float]) -> float | None:
    """The share of all processors' time that other processes took since `began`, which is of `processor_time`; None if
    no time has passed on its clock."""
    worked, there, own = np.subtract(processor_time(), began)
    return max(0.0, float((worked - own) / there)) if there > 0 else None

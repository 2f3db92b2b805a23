"""Measures how long this process's threads waited for a CPU core.  They wait longer on a busy machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

BUSY_SHARE = 0.1
"""A thread counts as working if it ran for more than this fraction of the busiest thread's running time."""
_THREADS_FOLDER = Path("/proc/self/task")


def run_times() -> dict[int, tuple[int, int]]:
    """Returns for each thread how long it ran and how long it waited for a core, in nanoseconds.  Leaves out threads
    that have ended.  Returns an empty dict if the operating system does not report these times."""
    thread_times = {}
    for thread_folder in _THREADS_FOLDER.iterdir() if _THREADS_FOLDER.is_dir() else ():
        with suppress(OSError):
            cpu_ns, delay_ns, _ = map(int, (thread_folder / "schedstat").read_text().split())
            thread_times[int(thread_folder.name)] = (cpu_ns, delay_ns)
    return thread_times


def waiting_since(began: Mapping[int, tuple[int, int]]) -> float | None:
    """Returns the ratio of waiting time to running time since `began`, over the threads of this process.

    `began` is a result of `run_times`.  Returns None if the operating system does not report these times.  Leaves out
    threads that hardly ran, such as a library's helper thread."""
    times = [np.subtract(current_times, began.get(thread, (0, 0))) for thread, current_times in run_times().items()]
    max_ns = max((cpu_ns for cpu_ns, _ in times), default=0)
    cpu_ns, delay_ns = np.sum([pair for pair in times if pair[0] >= BUSY_SHARE * max_ns], axis=0) if max_ns else (0, 0)
    return float(delay_ns / cpu_ns) if cpu_ns > 0 else None

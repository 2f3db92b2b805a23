"""Implements the timer of a CPU.  It pins each of torch's threads to one processor during timing.

A thread that moves to another core has cache misses there.  Each thread is pinned to the processor on which it already
runs.  If two threads share a core, one moves to an idle core.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core.environment import last_level_cache_bytes
from rooflab.bench.core.timers import Call, Flush, Function, Timer
from rooflab.kernels._waiting import BUSY_SHARE, run_times, waiting_since

_TASK_FOLDER, _CPUS_FOLDER = Path("/proc/self/task"), Path("/sys/devices/system/cpu")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The numbers of two settings of mallopt(3)."""
_thread_ids: dict[tuple[int, int], tuple[int, ...]] = {}
"""Torch's threads by (calling thread, number of threads), cached because a search for threads takes 10 ms or more."""


@contextmanager
def pinned_threads() -> Iterator[str]:
    """Pins torch's threads.  Yields `threads pinned`, or the reason why they were not pinned.

    At the end, threads get their former processors back.  A thread started meanwhile gets the calling thread's."""
    old_affinities = _affinities()
    allowed_cpus = old_affinities.get(threading.get_native_id(), set())
    if pin_failure := _pin(old_affinities, allowed_cpus):
        yield f"threads not pinned: {pin_failure}"
        return
    try:
        yield "threads pinned"
    finally:
        _release(old_affinities, allowed_cpus)


def _pin(before: Mapping[int, set[int]], allowed: set[int]) -> str:
    """Pins each of torch's threads to one of the processors `allowed`. Returns "", or why that is impossible."""
    thread_count = torch.get_num_threads()
    if not allowed:
        return "this system does not offer it"
    if thread_count > len(allowed):
        return f"{thread_count} on {len(allowed)} processors"
    threads = _threads(thread_count)
    if len(threads) != thread_count:
        return f"{len(threads)} of {thread_count} were found"
    try:
        # The processor that last ran the thread: proc(5), field 39 of `stat`, of which two come before the name's end.
        stat_rows = [(_TASK_FOLDER / str(thread) / "stat").read_text().rpartition(")")[2].split() for thread in threads]
        chosen_cpus = assign([int(fields[36]) for fields in stat_rows], allowed, {cpu: _core(cpu) for cpu in allowed})
        for thread, chosen_cpu in zip(threads, chosen_cpus, strict=True):
            os.sched_setaffinity(thread, {chosen_cpu})
    except OSError as error:
        _release(before, allowed)
        return str(error.strerror)
    return ""


def assign(last_cpus: Sequence[int], allowed: Collection[int], core_of: Mapping[int, object]) -> list[int]:
    """Chooses a different processor for each thread, if possible on a core that no other thread uses.

    A thread keeps its last processor if its core is idle.  Otherwise it gets a processor on an idle core.  Without an
    idle core, it keeps its last processor or gets any free one."""
    cpus: dict[int, int] = {}
    core_by_thread = [core_of.get(cpu) for cpu in last_cpus]
    # Threads that want the core of an earlier thread come last: they are moved if another core is idle.
    for index in sorted(range(len(last_cpus)), key=lambda index: core_by_thread.index(core_by_thread[index]) != index):
        free_cpus = [cpu for cpu in (last_cpus[index], *sorted(allowed)) if cpu in allowed and cpu not in cpus.values()]
        busy_cores = {core_of[cpu] for cpu in cpus.values()}
        cpus[index] = next((cpu for cpu in free_cpus if core_of[cpu] not in busy_cores), free_cpus[0])
    return [cpus[index] for index in range(len(last_cpus))]


def _threads(count: int) -> tuple[int, ...]:
    """Returns the ids of the calling thread and torch's workers, found by their run time while torch adds tensors."""
    cache_key = caller_id, _ = threading.get_native_id(), count
    if cache_key in _thread_ids and all((_TASK_FOLDER / str(thread)).is_dir() for thread in _thread_ids[cache_key]):
        return _thread_ids[cache_key]
    work_tensor = torch.ones(2**22)
    work_tensor.add_(1.0)  # starts the threads
    old_run_times = run_times()
    for _ in range(4):
        work_tensor.add_(1.0)
    time_by_thread = {thread: times[0] - old_run_times.get(thread, (0, 0))[0] for thread, times in run_times().items()}
    min_run_time = BUSY_SHARE * time_by_thread.get(caller_id, 0)
    worker_threads = sorted(
        (thread for thread in time_by_thread if thread != caller_id and time_by_thread[thread] > min_run_time),
        key=lambda t: -time_by_thread[t],
    )
    threads = (caller_id, *worker_threads[: count - 1])
    if len(threads) == count:
        _thread_ids[cache_key] = threads
    return threads


def _core(cpu: int) -> object:
    topology_folder = _CPUS_FOLDER / f"cpu{cpu}" / "topology"
    try:
        return tuple((topology_folder / name).read_text().strip() for name in ("physical_package_id", "core_id"))
    except OSError:
        return cpu


def _affinities() -> dict[int, set[int]]:
    """Returns the processors that each thread of this process may use. Empty if the system does not report them."""
    affinities: dict[int, set[int]] = {}
    for task_folder in _TASK_FOLDER.iterdir() if hasattr(os, "sched_setaffinity") and _TASK_FOLDER.is_dir() else ():
        with suppress(OSError):
            affinities[int(task_folder.name)] = os.sched_getaffinity(int(task_folder.name))
    return affinities


def _release(before: Mapping[int, set[int]], allowed: set[int]) -> None:
    """Gives each thread its processors from before the pinning. Threads started since then get those in `allowed`."""
    for thread, current_cpus in _affinities().items():
        affinity = before.get(thread, allowed)
        if current_cpus != affinity:
            with suppress(OSError):
                os.sched_setaffinity(thread, affinity)


def keep_freed_memory() -> str:
    """Makes the allocator keep freed memory for the rest of the process.  Returns `, freed memory kept` for the name of
    the timing method, or an empty text if the allocator has no such setting.

    Without this setting, the next call may have page faults: softmax of 16 x 1,024 took 210 us instead of 120 us.
    Allocations above 32 MiB, glibc's limit, are still returned to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *of: 0)
    accepted_settings = [mallopt(_TRIM_THRESHOLD, 2**31 - 1), mallopt(_MMAP_THRESHOLD, 2**25)]
    return ", freed memory kept" if all(accepted_settings) else ""


class CpuTimer(Timer):
    """Times functions with `perf_counter`.  Each of torch's threads is pinned to one processor."""

    def __init__(self, cold: bool = True, flush: str = "read", clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self.flush = Flush("cpu", last_level_cache_bytes() if cold else 0, flush)
        self._step = min(_step(clock) for _ in range(1000))
        self._memory = keep_freed_memory()
        self._threads = ""

    def round(self, calls: Sequence[Call], observe: Function | None = None) -> dict[str, float]:
        seconds_by_name = {}
        for name, timed_call, call_count in calls:
            self.flush()
            start_s = self._clock()
            for _ in range(call_count):
                timed_call()
            seconds_by_name[name] = self._clock() - start_s
        if observe:
            observe()
        return seconds_by_name

    @contextmanager
    def sampling(self) -> Iterator[Callable[[], float | None]]:
        """Pins the threads only after the warm-up: threads that libraries start earlier must not inherit a pin."""
        with pinned_threads() as pin_note:
            self._threads = f", {pin_note}"
            yield partial(waiting_since, run_times())

    def step_s(self, readings: Sequence[float]) -> float:
        """Returns the smallest observed difference between two readings of the clock."""
        return self._step

    def method(self, name: str) -> str:
        return f"cpu perf_counter{self._memory}{self._threads}{self.flush.note}"


def _step(clock: Callable[[], float]) -> float:
    start_s = now_s = clock()
    while now_s <= start_s:
        now_s = clock()
    return now_s - start_s

"""Reads the clocks of one GPU while the GPU works, and the reasons for a lowered clock."""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection
from contextlib import ExitStack
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rooflab.bench.base.plain import Json, JsonObject
from rooflab.bench.core.environment import ask, nvml_of, power_w

if TYPE_CHECKING:  # it imports Triton
    from rooflab.bench.core.timers.sm_clock import DeviceClock

REASONS = {
    0x001: "idle",
    0x002: "clocks set by the user",  # by `nvidia-smi -ac`; some cards report `-lgc` here too
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}
"""NVML's reasons for a clock below the highest clock (nvml.h, `nvmlClocksEventReason...`)."""
INVALID = 0x008 | 0x020 | 0x040 | 0x080
"""The reasons that make a reading invalid: heat and the power brake.  A software power cap keeps a card within its
power limit under a large matrix product.  This is normal: the summary names the cap, and the reading stays valid."""
MIN_MAX_FIELDS = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")
"""The readings of NVML for which a summary has the minimum and the maximum."""


class ClockWatch(ExitStack):
    """Reads a GPU's clocks inside `with`, while the GPU works.

    The SM clock is read on the device (`sm_clock.DeviceClock`).  NVML reports power, temperature and the reasons for a
    lower clock.  NVML is not used without `uuid`, or if NVML is missing."""

    def __init__(self, uuid: str | None, device_clock: DeviceClock | None = None, unread: str = ""):
        super().__init__()
        self._unread = {"sm_clock_unread": unread} if unread else {}
        self._uuid = uuid
        self._device_clock = device_clock
        self._nvml: tuple[Any, Any] | None = None
        self._readings: list[dict[str, Any]] = []

    def __enter__(self) -> ClockWatch:
        if self._uuid is not None:
            self._nvml = self.enter_context(nvml_of(self._uuid))
        return self

    def read(self) -> None:
        if self._device_clock is not None:
            self._device_clock.enqueue()
        if self._nvml is None:
            return
        nvml, gpu_handle = self._nvml
        self._readings.append(
            {
                "sm_clock_mhz": ask(nvml, "nvmlDeviceGetClockInfo", gpu_handle, nvml.NVML_CLOCK_SM),
                "memory_clock_mhz": ask(nvml, "nvmlDeviceGetClockInfo", gpu_handle, nvml.NVML_CLOCK_MEM),
                "power_w": power_w(nvml, gpu_handle),
                "temperature_c": ask(nvml, "nvmlDeviceGetTemperature", gpu_handle, nvml.NVML_TEMPERATURE_GPU),
                "throttle_reasons": ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", gpu_handle),
                "processes": [
                    process.pid for process in ask(nvml, "nvmlDeviceGetComputeRunningProcesses", gpu_handle) or ()
                ],
            }
        )

    def summary(self) -> JsonObject | None:
        """Returns a summary of the GPU's clock readings as JSON values.  Without readings, returns the reason or None.

        The summary has the minimum and maximum of NVML's readings, and all throttle reasons.  `throttled` lists the
        reasons that make a reading invalid.  `other_processes` is the number of other processes on the GPU; None if
        NVML does not list this process, as in some containers.  `sm_clock_hz` and `sm_clock_range_hz` were read on the
        device.  `sm_clock_unread` and `throttle_unread` say why values are missing.
        """
        sm_clocks = self._device_clock.readings_hz() if self._device_clock is not None else []
        if not self._readings and not sm_clocks:
            return self._unread or None

        def read(name: str) -> list[Json]:
            return [gpu_reading[name] for gpu_reading in self._readings if gpu_reading[name] is not None]

        flags = reduce(or_, read("throttle_reasons")) if read("throttle_reasons") else None
        absence_reason = "NVML gave no reasons" if self._readings else "NVML was not asked"
        return {
            "readings": len(self._readings),
            **{name: [min(read(name)), max(read(name))] if read(name) else None for name in MIN_MAX_FIELDS},
            "throttle_reasons": flags,
            "throttle_names": [name for flag, name in REASONS.items() if (flags or 0) & flag],
            "throttled": None if flags is None else [name for flag, name in REASONS.items() if flags & flag & INVALID],
            **({"throttle_unread": absence_reason} if flags is None else {}),
            "other_processes": others_among({pid for pids in read("processes") for pid in pids}),
            "sm_clock_hz": statistics.median(sm_clocks) if sm_clocks else None,
            "sm_clock_range_hz": [min(sm_clocks), max(sm_clocks)] if sm_clocks else None,
            **self._unread,
        }


def others_among(pids: Collection[int]) -> int | None:
    """Counts the processes in `pids` that are not part of this program.  Returns None if `pids` lacks this process.

    The program consists of this process's oldest ancestor that runs Python, and all descendants of that ancestor."""
    if os.getpid() not in pids:
        return None
    oldest_process = psutil.Process()
    while (parent_process := oldest_process.parent()) is not None and _runs_python(parent_process):
        oldest_process = parent_process
    return len(set(pids) - {oldest_process.pid, *(child.pid for child in oldest_process.children(recursive=True))})


def _runs_python(process: psutil.Process) -> bool:
    try:
        return Path(process.exe() or "").name.startswith("python")
    except psutil.AccessDenied:  # of another user, so not of this program
        return False

"""A GPU's clocks: watched while it works, told whether it was throttled, and locked where that is permitted.

The clock that counts is the one that the device itself reads (`sm_clock.DeviceClock`); NVML adds power, temperature
and the reasons for a lower clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import or_
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rooflab.bench.processes.child import terminated_as_exception
from rooflab.bench.records.environment import ask, nvml_of, power

if TYPE_CHECKING:  # it imports Triton
    from rooflab.bench.timing.sm_clock import DeviceClock

REASONS = {
    0x001: "idle",
    0x002: "clocks set by the user",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}
"""NVML's reasons for a clock below the highest (nvml.h, `nvmlClocksEventReason...`)."""
SET_BY_USER = 0x002
"""`nvidia-smi -ac`, and on the cards that say so `-lgc`."""
THROTTLED = 0x008 | 0x020 | 0x040 | 0x080
"""Those that spoil a reading: heat and the power brake.  A software power cap is how a card meets its power limit under
a large matrix product, and belongs to what it can do; it is named and spoils nothing."""
TOLERANCE = 0.02
"""How far a second reading of a locked clock under load may lie from the first."""


def reason_names(bits: int | None, among: int = 0x1FF) -> list[str]:
    """NVML's reasons in words, of those in `among`."""
    return [name for bit, name in REASONS.items() if (bits or 0) & bit & among]


class ClockWatch:
    """Reads a GPU's clocks while it works, inside `with`; without NVML or with `uuid` None it asks NVML nothing."""

    def __init__(self, uuid: str | None, device_clock: DeviceClock | None = None):
        self._uuid = uuid
        self._device_clock = device_clock
        self._open = ExitStack()
        self._nvml: tuple[Any, Any] | None = None
        self._readings: list[dict[str, Any]] = []

    def __enter__(self) -> ClockWatch:
        if self._uuid is not None:
            self._nvml = self._open.enter_context(nvml_of(self._uuid))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._nvml = None

    def read(self) -> None:
        if self._device_clock is not None:
            self._device_clock.enqueue()
        if self._nvml is None or self._nvml[1] is None:
            return
        nvml, handle = self._nvml
        power_mw, power_by = power(nvml, handle)
        self._readings.append(
            {
                "power_by": power_by,
                "sm_clock_mhz": ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
                "memory_clock_mhz": ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
                "power_w": None if power_mw is None else power_mw / 1000,
                "temperature_c": ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
                "throttle_reasons": ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle),
            }
        )

    def summary(self) -> dict[str, Any] | None:
        """What was seen, as JSON values; None where nothing was read.

        Least and largest of NVML's readings; every throttle bit, in words too, and those that spoil a reading
        (`throttled`, None with the reason in `throttle_unread` where NVML did not answer); what power was read by; the
        median, the least and the largest SM clock that the device read itself.
        """
        held = self._device_clock.readings_hz() if self._device_clock is not None else []
        if not self._readings and not held:
            return None
        result: dict[str, Any] = {"readings": len(self._readings)}
        for name in ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c"):
            values = [reading[name] for reading in self._readings if reading[name] is not None]
            result[name] = [min(values), max(values)] if values else None
        seen = [reading["throttle_reasons"] for reading in self._readings if reading["throttle_reasons"] is not None]
        bits = reduce(or_, seen) if seen else None
        result["throttle_reasons"] = bits
        result["throttle_names"] = reason_names(bits)
        result["throttled"] = None if bits is None else reason_names(bits, THROTTLED)
        if bits is None:
            result["throttle_unread"] = "NVML gave no reasons" if self._readings else "NVML was not asked"
        if sources := sorted({reading["power_by"] for reading in self._readings if reading["power_by"]}):
            result["power_by"] = ", ".join(sources)
        result["sm_clock_hz"] = statistics.median(held) if held else None
        result["sm_clock_range_hz"] = [min(held), max(held)] if held else None
        return result


@contextmanager
def locked_clocks(uuid: str, read_hz: Callable[[], float]) -> Iterator[float]:
    """Locks a GPU's SM clock inside `with` to the one that it holds at its power limit, NVML's base.

    Yields the clock in MHz, by NVML where it says, after `read_hz` has read it on the device under load.  However the
    block is left, by an exception, an interrupt, a termination signal or the end of its terminal, the clocks are set
    free.  Raises `ValueError` where NVML is not there or does not permit it, and where the clock read does not hold.
    """
    with nvml_of(uuid) as found:
        if found is None or found[1] is None:
            raise ValueError("lock-clocks: expected NVML with this GPU, got none; install nvidia-ml-py")
        nvml, handle = found
        wanted = nvml.NVML_CLOCK_LIMIT_ID_TDP
        with terminated_as_exception():
            try:
                nvml.nvmlDeviceSetGpuLockedClocks(handle, wanted, wanted)
            except nvml.NVMLError as error:
                raise ValueError(
                    f"lock-clocks: NVML answers {error}; locking needs root, and a card that permits it"
                ) from error
            try:
                held_hz = _verified(read_hz(), read_hz())
                yield float(ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM) or held_hz / 1e6)
            finally:
                try:
                    nvml.nvmlDeviceResetGpuLockedClocks(handle)
                except nvml.NVMLError as error:
                    raise ValueError(
                        f"lock-clocks: NVML answers {error} to setting the clocks free; run `nvidia-smi -rgc`"
                    ) from error


def _verified(first: float, second: float) -> float:
    if abs(second - first) > TOLERANCE * first:
        raise ValueError(
            f"lock-clocks: expected a clock that holds, and the device read {first / 1e6:.0f} and then "
            f"{second / 1e6:.0f} MHz under load"
        )
    return second

"""What a run of measurements is asked, beside its kernels and cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

TIMERS: Mapping[str, tuple[str, ...]] = {"cpu": ("perf_counter",), "cuda": ("events", "graph", "cupti")}
"""Timing methods by device type, the default first: `events` needs no capture, so that it can time every function, and
unlike a profiler it adds no work to the device.  See `cuda.EventTimer`, `cuda.GraphTimer` and `cupti.CuptiTimer`."""
FLUSHES = ("read", "write")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Made once, from the command line, and handed on whole.

    Raises `ValueError` on a budget that is not positive, an unknown flush, or a timer that the device does not have.
    """

    device: str = "cpu"
    """`cpu`, or a CUDA device."""
    seed: int = 0
    """Of the inputs and of the order of timing."""
    budget_s: float = 0.5
    """For one kernel on one case; the kernels of a case are timed interleaved."""
    limit_s: float = math.inf
    """For the whole run: what does not begin within it is left out."""
    timer: str | None = None
    """One of `TIMERS`; None: the device's default."""
    flush: str = "read"
    """How the cache is emptied before a sample: one of `FLUSHES`."""
    min_samples: int = 5
    """Of each kernel, however long they take."""
    locked_sm_clock_mhz: float | None = None
    """The SM clock to which the caller has locked the GPU (`held_card`)."""
    checked: bool = False
    """Whether the caller has checked the kernels: then they are only timed, without a look at a CPU's memory."""
    judge: bool = True
    """Whether timed calls get fresh values, and the outputs that the last ones leave are judged."""
    paired: bool = False
    """Whether the reading is one of a pair, which a fresh process takes: then a spread of its samples is no noise."""
    roof: bool = True
    """Whether there is a bound."""

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ValueError(f"budget: expected seconds above 0, got {self.budget_s}")
        check_flush(self.flush)
        check_timer(self.timer, self.device.partition(":")[0])


def check_flush(flush: str) -> None:
    """Raises `ValueError` on a way to empty a cache that is none of `FLUSHES`."""
    if flush not in FLUSHES:
        raise ValueError(f"flush: expected one of {', '.join(FLUSHES)}, got {flush!r}")


def check_timer(timer: str | None, device_type: str) -> str:
    """The timing method for a device type: `timer`, or the default of `TIMERS`.

    Raises `ValueError` on a method that the device does not have, and on a device that is neither cpu nor cuda.
    """
    if device_type not in TIMERS:
        raise ValueError(f"device: expected cpu or cuda, got {device_type}")
    if timer is not None and timer not in TIMERS[device_type]:
        needs = ", which needs a CUDA device" if timer in TIMERS["cuda"] else ""
        raise ValueError(
            f"timer: expected one of {', '.join(TIMERS[device_type])} on {device_type}, got {timer}{needs}"
        )
    return timer or TIMERS[device_type][0]

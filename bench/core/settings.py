"""The settings of a run of measurements, beside its kernels and cases."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLUSHES = ("read", "write")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a measurement, made once from the command line and handed on whole.

    Raises `ValueError` on a budget that is not positive, an unknown flush, or another device.
    """

    device: str = "cpu"
    """`cpu`, or a CUDA device."""
    seed: int = 0
    """Seed of the inputs and of the order of timing."""
    budget_s: float = 0.5
    """Seconds for one kernel on one case; the kernels of a case are timed interleaved."""
    limit_s: float = math.inf
    """Seconds for the whole run: a case that does not begin within them is left out."""
    flush: str = "read"
    """The way in which the cache is emptied before a sample: one of `FLUSHES`."""
    min_samples: int = 5
    """Fewest samples of each kernel, however long they take."""
    checked: bool = False
    """Whether the caller has checked the kernels: then they are only timed."""
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
        check_device(self.device.partition(":")[0])


def check_flush(flush: str) -> None:
    """Raises `ValueError` on a way to empty a cache that is none of `FLUSHES`."""
    if flush not in FLUSHES:
        raise ValueError(f"flush: expected one of {', '.join(FLUSHES)}, got {flush!r}")


def check_device(device_type: str) -> None:
    """Raises `ValueError` on a device that is neither cpu nor cuda."""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device_type}")

"""What a run of measurements is asked, beside its kernels, cases and device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

FlushBy = Literal["read", "write"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Made once, from the command line, and handed on whole.

    Raises `ValueError` on a budget that is not positive, and on an unknown flush.
    """

    seed: int = 0
    """Of the inputs and of the order of timing."""
    budget_s: float = 0.5
    """For one kernel on one case; the kernels of a case are timed interleaved."""
    limit_s: float = math.inf
    """For the whole run: what does not begin within it is left out."""
    timer: str | None = None
    """One of `timing.TIMERS`; None: the device's default."""
    flush: FlushBy = "read"
    """How the cache is emptied before a sample."""
    min_samples: int = 5
    """Of each kernel, however long they take."""
    lock_clocks: bool = False
    """Holds the GPU's SM clock meanwhile."""
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
        if self.flush not in get_args(FlushBy):
            raise ValueError(f"flush: expected one of {', '.join(get_args(FlushBy))}, got {self.flush!r}")

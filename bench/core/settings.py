"""Holds the settings of a measurement.  They do not include the choice of kernels and test cases."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Holds the options of a measurement, from the command line.

    Raises `ValueError` on a time budget of 0 or less, or a device other than cpu and cuda."""

    device: str = "cpu"
    """`cpu`, or a CUDA device."""
    seed: int = 0
    """Seed of the inputs and of the order of timing."""
    budget_s: float = 0.5
    """Seconds for each kernel on each case.  The kernels of a case are timed interleaved."""
    limit_s: float = math.inf
    """Seconds for the whole run.  A case that does not begin within this time is left out."""
    min_samples: int = 5
    """The least number of samples of each kernel, even if they take longer than the budget."""
    checked: bool = False
    """Whether the caller has checked the kernels.  Then the kernels are only timed."""
    judge: bool = True
    """Whether timed calls get fresh values, and the outputs of the last calls are judged."""
    paired: bool = False
    """Whether the reading is one of a pair, taken in a fresh process.  Then a spread of the samples is no noise."""
    roof: bool = True
    """Whether the record gets a roofline bound."""

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ValueError(f"budget: expected seconds above 0, got {self.budget_s}")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device: expected cpu or cuda, got {self.device}")

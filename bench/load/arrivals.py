"""Draws random arrival times of requests for an open loop, in which requests do not wait for earlier answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Arrivals:
    """Holds the request rate of a Poisson process.  Raises `ValueError` on a rate of 0 or less."""

    rate: float
    """The requests per second; infinite if all requests arrive at once."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate: expected a number above 0, got {self.rate}")

    def offsets(self, count: int, random: np.random.Generator) -> list[float]:
        """Draws random arrival times for `count` requests, in seconds.  The last arrival time is random too.  vLLM
        scales all times so that the last is `count / rate`.  This changes the distribution of the gaps."""
        if math.isinf(self.rate):
            return [0.0] * count
        return [float(arrival_s) for arrival_s in np.cumsum(random.exponential(1 / self.rate, count))]

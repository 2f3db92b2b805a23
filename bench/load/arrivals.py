"""Draws random arrival times of requests for an open loop, in which requests do not wait for earlier answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

ARRIVAL_LAWS = ("poisson", "constant", "gamma")


@dataclass(frozen=True)
class Arrivals:
    """Holds the request rate and the distribution of the gaps between requests.  Raises `ValueError` on bad values."""

    rate: float
    """The requests per second; infinite if all requests arrive at once."""
    law: str = "poisson"
    burstiness: float = 1.0
    """The shape of the gamma law: 1 is a Poisson process, a smaller value is burstier, a larger value more even."""

    def __post_init__(self) -> None:
        for name, option_value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if not option_value > 0 or (name != "rate" and math.isinf(option_value)):
                raise ValueError(f"{name}: expected a number above 0, got {option_value}")
        if self.law not in ARRIVAL_LAWS:
            raise ValueError(f"arrivals: expected one of {', '.join(ARRIVAL_LAWS)}, got {self.law!r}")
        if self.burstiness != 1 and self.law != "gamma":
            raise ValueError(f"burstiness: expected --arrivals gamma with it, got {self.law}")

    def offsets(self, count: int, random: np.random.Generator) -> list[float]:
        """Draws random arrival times for `count` requests, in seconds.  The last arrival time is random too.  vLLM
        scales all times so that the last is `count / rate`.  This changes the distribution of the gaps."""
        if math.isinf(self.rate):
            return [0.0] * count
        if self.law == "constant":
            return [arrival_index / self.rate for arrival_index in range(count)]
        gaps = random.gamma(self.burstiness, 1 / (self.rate * self.burstiness), count)
        return [float(arrival_s) for arrival_s in np.cumsum(gaps)]

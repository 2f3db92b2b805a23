"""The arrival times of requests in an open loop: the laws of the gaps, and offsets in seconds from the loop's start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LAWS = ("poisson", "constant", "gamma")


@dataclass(frozen=True)
class Arrivals:
    """The requests per second and the law of the gaps between them.  Raises `ValueError` on impossible values."""

    rate: float
    """The requests per second; infinite if all requests arrive at once."""
    law: str = "poisson"
    burstiness: float = 1.0
    """The shape of the gamma law: 1 is a Poisson process, a smaller value is burstier, a larger value more even."""

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if not value > 0 or (name != "rate" and math.isinf(value)):
                raise ValueError(f"{name}: expected a number above 0, got {value}")
        if self.law not in LAWS:
            raise ValueError(f"arrivals: expected one of {', '.join(LAWS)}, got {self.law!r}")
        if self.burstiness != 1 and self.law != "gamma":
            raise ValueError(f"burstiness: expected --arrivals gamma with it, got {self.law}")

    def offsets(self, count: int, random: np.random.Generator) -> list[float]:
        """Draws the arrivals of `count` requests.  Unlike in vLLM, the arrivals are not stretched to `count / rate`
        seconds: the rate of an open loop is the rate of its law, and the last arrival is random."""
        if math.isinf(self.rate):
            return [0.0] * count
        if self.law == "constant":
            return [place / self.rate for place in range(count)]
        gaps = random.gamma(self.burstiness, 1 / (self.rate * self.burstiness), count)
        return [float(value) for value in np.cumsum(gaps)]

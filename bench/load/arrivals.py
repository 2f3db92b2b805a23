"""The arrival times of requests: the laws of an open loop, as offsets in seconds from its begin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LAWS = ("poisson", "constant", "gamma")


@dataclass(frozen=True)
class Arrivals:
    """The requests per second and the law of the gaps.  Raises `ValueError` on impossible values."""

    rate: float
    """Requests per second; infinite if all requests arrive at once."""
    law: str = "poisson"
    burstiness: float = 1.0
    """The shape of the gamma law: 1 is a Poisson process, less is burstier, more is more even."""
    ramp_to: float | None = None
    """The rate at the end, which is reached in a straight line; the law is then a Poisson process."""

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("ramp", self.ramp_to), ("burstiness", self.burstiness)):
            if value is not None and (not value > 0 or (name != "rate" and math.isinf(value))):
                raise ValueError(f"{name}: expected a number above 0, got {value}")
        if self.law not in LAWS:
            raise ValueError(f"arrivals: expected one of {', '.join(LAWS)}, got {self.law!r}")
        if self.burstiness != 1 and self.law != "gamma":
            raise ValueError(f"burstiness: expected --arrivals gamma with it, got {self.law}")
        if self.ramp_to is not None and (math.isinf(self.rate) or self.law != "poisson"):
            raise ValueError("ramp: expected finite rates and no other --arrivals")

    def offsets(self, count: int, random: np.random.Generator) -> list[float]:
        """The arrivals of `count` requests.  They are not stretched to `count / rate` seconds, as in vLLM: the rate of
        an open loop is the rate of its law, and the last arrival is random."""
        if math.isinf(self.rate):
            return [0.0] * count
        if self.law == "constant":
            return [place / self.rate for place in range(count)]
        if self.ramp_to is None:
            gaps = random.gamma(self.burstiness, 1 / (self.rate * self.burstiness), count)
            return [float(value) for value in np.cumsum(gaps)]
        return self._ramp(np.cumsum(random.exponential(1.0, count)), count)

    def _ramp(self, passed: np.ndarray, count: int) -> list[float]:
        """Arrivals of a Poisson process whose rate is a straight line: the expected number of arrivals until `t`, which
        is `a t + (b - a) t^2 / 2T`, is inverted at the arrivals of a process of rate 1."""
        assert self.ramp_to is not None, "the caller has looked"
        a, b = self.rate, self.ramp_to
        slope = (b - a) / (2 * count / (a + b))  # the ramp takes as long as `count` requests on average
        if slope == 0:
            return [float(value) for value in passed / a]
        inside = np.maximum(a * a + 2 * slope * passed, 0.0)  # a falling ramp ends at rate 0
        return [float(value) for value in (np.sqrt(inside) - a) / slope]

"""Searches a kernel's configs: drops configs that cannot win, and times small groups beside the best config so far.

This module uses no device: the caller gives the least time and the measured time of each config.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rooflab.kernels.tuning import Footprint
from rooflab.roofline.model import Ceilings, Cost, bound

FAR = 1.3
"""A config whose first samples take this many times as long as the best one's is dropped."""
GROUP = 8
"""Configs timed beside the best so far: enough to share its samples and to compile on all cores, few enough to move."""
FINALISTS = 3
"""Configs that go on to the measurement that is recorded, beside the launcher's own choice."""

Seconds = tuple[float, ...]
"""One value for each case of the search."""
Times = Callable[[Sequence[Any]], Mapping[Any, Seconds | str]]
"""Times configs beside each other; gives a text for a config that failed."""


@dataclass
class Found:
    """The result of a search."""

    scores: dict[Any, float] = field(default_factory=dict)
    """Time over that of the launcher's own choice, geometric mean over the cases, of every config not dropped."""
    failures: dict[Any, str] = field(default_factory=dict)
    bounded: int = 0
    """Configs whose own bound lay above the best time: they cannot win, and were not compiled."""
    dropped: int = 0
    """Configs dropped after their first samples."""
    left: int = 0
    """Configs not tried before the deadline."""

    def finalists(self, own: Any) -> list[Any]:
        """The fastest configs, the launcher's own choice `own` not among them."""
        faster = sorted((config for config in self.scores if config != own), key=lambda config: self.scores[config])
        return faster[:FINALISTS]


def search(
    own: Any,
    candidates: Sequence[Any],
    least: Callable[[Any], Seconds],
    times: Times,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Looks for a config faster than `own`, the launcher's choice, until `deadline`.

    Configs that differ from the best so far in the fewest fields are tried first, ties in the order of `candidates`:
    the search moves in small steps from a good config.  `least` gives the time that a config
    needs at least.  A group is timed beside the best config so far and scored relative to it, so that a card that
    slows down over the search slows both.
    """
    found = Found()
    first = times([own])[own]
    if isinstance(first, str):
        found.failures[own] = first
        return found
    best, best_s = own, first
    found.scores[own] = 1.0
    waiting = [config for config in candidates if config != own]
    while waiting:
        if clock() >= deadline:
            found.left = len(waiting)
            break
        able = [config for config in waiting if _mean(least(config)) < _mean(best_s)]
        found.bounded += len(waiting) - len(able)
        able.sort(key=lambda config: _distance(config, best))  # stable: the order given decides among equals
        group, waiting = able[:GROUP], able[GROUP:]
        if not group:
            break
        read = times([best, *group])
        anchor = read[best]
        if isinstance(anchor, str):
            found.failures[best] = anchor
            break
        scale = found.scores[best] / _mean(anchor)
        best_s = anchor
        for config in group:
            seconds = read[config]
            if isinstance(seconds, str):
                found.failures[config] = seconds
            elif _mean(seconds) > FAR * _mean(anchor):
                found.dropped += 1
            else:
                found.scores[config] = scale * _mean(seconds)
                if found.scores[config] < found.scores[best]:
                    best, best_s = config, seconds
    return found


def _distance(one: Any, other: Any) -> int:
    """How many fields differ."""
    return sum(getattr(one, item.name) != getattr(other, item.name) for item in fields(one))


def _mean(seconds: Seconds) -> float:
    """Geometric mean."""
    return math.exp(sum(math.log(max(value, 1e-12)) for value in seconds) / len(seconds))


def least_s(cost: Cost, ceilings: Ceilings, footprint: Footprint | None, sms: int) -> float:
    """The least seconds of a launch: the op's bound, and the busiest SM's share of padded tiles at its full rate.

    CTAs are dealt out one by one, so that some SM runs `ctas / sms` rounded up of them, whatever its occupancy.  Of the
    bytes those that are read bound a time: what is written may still lie in L2 when the clock stops
    (`reading.above_limits`).
    """
    seconds = bound(replace(cost, write_bytes=0.0), ceilings).seconds
    if footprint is None or not footprint.tensor_flops or len(cost.tensor_flops) != 1:
        return seconds
    (dtype,) = cost.tensor_flops
    busiest = -(-footprint.ctas // sms)
    return max(seconds, busiest * footprint.tensor_flops * sms / ceilings.matrix_rate(dtype))

"""Searches for a kernel's fastest config. Skips configs that cannot win, and times small groups with the best so far.

This module uses no GPU. The caller passes two functions: one computes a config's least possible time, the other
measures its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import geometric_mean
from typing import Any

from rooflab.bench.base.system_time import time
from rooflab.kernels.tuning import Footprint
from rooflab.roofline.model import Ceilings, Cost, bound

MAX_TIME_RATIO = 1.3
"""A config is dropped if its first samples take this many times as long as the best config's samples."""
GROUP_SIZE = 8
"""The number of configs in a group with the best one: enough to use all cores, few enough to replace the best often."""
MAX_FINALISTS = 3
"""The number of configs that go on to the recorded measurement, with the launcher's own choice."""

Seconds = tuple[float, ...]
"""The seconds of a config, one value for each case of the search."""
Times = Callable[[Sequence[Any]], Mapping[Any, Seconds | str]]
"""Times configs interleaved.  The result for a config that failed is a text."""


@dataclass
class SearchResult:
    """Holds the result of a config search, and counts the configs that the search skipped or dropped."""

    scores: dict[Any, float] = field(default_factory=dict)
    """By config that was not dropped: its time over that of the launcher's own choice, geometric mean over cases."""
    failures: dict[Any, str] = field(default_factory=dict)
    bounded: int = 0
    """The number of configs that were not compiled: their own bound is above the best time, so they cannot win."""
    dropped: int = 0
    """The number of configs that were dropped after their first samples."""
    left: int = 0
    """The number of configs that were not tried before the deadline."""

    def finalists(self, start: Any) -> list[Any]:
        """Returns the fastest configs of the search.  `start`, the launcher's own choice, is not among them."""
        ranked_configs = sorted(
            (config for config in self.scores if config != start), key=lambda config: self.scores[config]
        )
        return ranked_configs[:MAX_FINALISTS]


def search(
    start: Any,
    candidates: Sequence[Any],
    least: Callable[[Any], Seconds],
    times: Times,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Searches until `deadline` for a config that is faster than `start`, the launcher's own choice.

    A config is skipped if its least possible time, `least(config)`, is not below the best time.  Configs that differ
    from the best one in few fields are tried first.

    Configs are timed in small groups, each with the best config so far, because the GPU may slow down meanwhile."""
    search_result = SearchResult()
    start_times = times([start])[start]
    if isinstance(start_times, str):
        search_result.failures[start] = start_times
        return search_result
    best_config, best_times = start, start_times
    search_result.scores[start] = 1.0
    untried_configs = [config for config in candidates if config != start]
    while untried_configs:
        if clock() >= deadline:
            search_result.left = len(untried_configs)
            break
        able_configs = [config for config in untried_configs if _mean(least(config)) < _mean(best_times)]
        search_result.bounded += len(untried_configs) - len(able_configs)
        able_configs.sort(key=lambda config: _distance(config, best_config))  # a stable sort: ties keep the given order
        config_group, untried_configs = able_configs[:GROUP_SIZE], able_configs[GROUP_SIZE:]
        if not config_group:
            break
        group_times = times([best_config, *config_group])
        best_group_times = group_times[best_config]
        if isinstance(best_group_times, str):
            search_result.failures[best_config] = best_group_times
            break
        score_per_second = search_result.scores[best_config] / _mean(best_group_times)
        best_times = best_group_times
        for config in config_group:
            seconds = group_times[config]
            if isinstance(seconds, str):
                search_result.failures[config] = seconds
            elif _mean(seconds) > MAX_TIME_RATIO * _mean(best_group_times):
                search_result.dropped += 1
            else:
                search_result.scores[config] = score_per_second * _mean(seconds)
                if search_result.scores[config] < search_result.scores[best_config]:
                    best_config, best_times = config, seconds
    return search_result


def _distance(first: Any, other: Any) -> int:
    """Counts the fields in which two configs differ."""
    return sum(getattr(first, config_field.name) != getattr(other, config_field.name) for config_field in fields(first))


def _mean(seconds: Seconds) -> float:
    """Returns the geometric mean of times in seconds. Times below 1 ps count as 1 ps."""
    return geometric_mean(max(case_time_s, 1e-12) for case_time_s in seconds)


def least_s(cost: Cost, ceilings: Ceilings, footprint: Footprint | None, sms: int) -> float:
    """Returns the least possible seconds of a launch: its roofline bound, or the busiest SM's matrix time if larger.

    The busiest SM runs `ceil(ctas / sms)` CTAs.  Its matrix time is their FLOPs, with padding, at the SM's full rate.
    The bound counts only bytes that are read, because written bytes may stay in L2 (`noise.above_limits`)."""
    seconds = bound(replace(cost, write_bytes=0.0), ceilings).seconds
    if footprint is None or not footprint.tensor_flops or len(cost.tensor_flops) != 1:
        return seconds
    (dtype,) = cost.tensor_flops
    busiest_sm_ctas = -(-footprint.ctas // sms)
    return max(seconds, busiest_sm_ctas * footprint.tensor_flops * sms / ceilings.matrix_rate(dtype))

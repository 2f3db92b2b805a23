"""Finds the causes of long gaps between two tokens, from the steps of our server in the gap (`GET /steps`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooflab.bench.load.metrics import times_of, token_steps
from rooflab.bench.load.trace import Trace

LONG = 1.5
"""A gap is long (a spike) if it exceeds this number multiplied by the median gap of its request."""
KINDS = ("prefill", "preemption", "another process", "unknown")
"""The words with which the text of a cause can begin."""
WAITED = 0.05
"""If the threads of a step waited for a core during more than this share of it, another process is the cause."""


@dataclass(frozen=True)
class Spike:
    """Describes a long gap between two tokens of one request."""

    request: int
    begin_s: float
    end_s: float
    cause: str

    @property
    def kind(self) -> str:
        """Returns the kind of the cause, one of `KINDS`."""
        return next(kind for kind in KINDS if self.cause.startswith(kind))


def on_our_clock(
    steps: Iterable[Mapping[str, Any]], now_s: float, half_s: float, round_trip_s: float
) -> tuple[dict[str, Any], ...]:
    """Returns the server's steps with times of the client's clock.  The server's clock showed `now_s` when the client's
    clock showed `half_s`, the middle of the request for the steps.

    If the two clocks differ by less than `round_trip_s`, they count as the same clock and nothing is shifted."""
    shift = half_s - now_s
    shift = 0.0 if abs(shift) <= round_trip_s else shift
    return tuple({**step, "begin_s": step["begin_s"] + shift, "end_s": step["end_s"] + shift} for step in steps)


def spikes(trace: Trace) -> list[Spike]:
    """Returns the long gaps of all answered requests.  The list is empty if the server does not report its steps."""
    if trace.steps is None:
        return []
    gaps_found = list[Spike]()
    for request in trace.counted:
        for answer in token_steps(request)[0] if times_of(request) else ():
            times = [time_s for time_s, _ in answer]
            gaps = np.diff(times)
            usual = float(np.median(gaps)) if len(gaps) else 0.0
            for index in np.flatnonzero(gaps > LONG * usual):
                begin_s, end = times[index], times[index + 1]
                gaps_found.append(Spike(request.index, begin_s, end, cause(begin_s, end, trace.steps)))
    return gaps_found


def cause(begin_s: float, end_s: float, steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns the cause of a gap.  A preemption in the gap is the first candidate: the server may have preempted this
    request and must then compute its prompt again.  The next candidates are the steps in the gap, the longest overlap
    first."""

    def overlap_s(step: Mapping[str, Any]) -> float:
        return min(end_s, float(step["end_s"])) - max(begin_s, float(step["begin_s"]))

    steps_in_gap = sorted((step for step in steps if overlap_s(step) > 0), key=overlap_s, reverse=True)
    if any(step["preempted"] for step in steps_in_gap):
        return "preemption"
    for step in steps_in_gap:
        if step["prompt_tokens"]:
            return f"prefill of {step['prompt_tokens']} tokens"
        if (step["waited"] or 0.0) > WAITED:
            return "another process"
    return "unknown"

"""Finds the causes of long gaps between two tokens, from the engine steps of Rooflab's server (`GET /steps`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooflab.bench.load.metrics import times_of, token_steps
from rooflab.bench.load.trace import Trace

LONG_GAP_RATIO = 1.5
"""A gap is long (a spike) if it exceeds this number multiplied by the median gap of its request."""
CAUSE_KINDS = ("prefill", "preemption", "another process", "unknown")
"""The words with which the text of a cause can begin."""
MAX_WAIT_SHARE = 0.05
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
        """Returns the kind of the cause, which is one of `CAUSE_KINDS`."""
        return next(cause_kind for cause_kind in CAUSE_KINDS if self.cause.startswith(cause_kind))


def on_our_clock(
    steps: Iterable[Mapping[str, Any]], now_s: float, half_s: float, round_trip_s: float
) -> tuple[dict[str, Any], ...]:
    """Shifts the times of the server's steps to the client's clock, and returns the shifted steps.

    `now_s` and `half_s` are the same moment on the server's clock and on the client's clock.  It is the middle of a
    request of `round_trip_s` seconds.  If the two clocks differ by at most `round_trip_s`, the times stay unchanged."""
    shift_s = half_s - now_s
    shift_s = 0.0 if abs(shift_s) <= round_trip_s else shift_s
    return tuple({**step, "begin_s": step["begin_s"] + shift_s, "end_s": step["end_s"] + shift_s} for step in steps)


def spikes(trace: Trace) -> list[Spike]:
    """Returns the long gaps between tokens in all answered requests, or nothing if the server reports no steps."""
    if trace.steps is None:
        return []
    found_spikes = list[Spike]()
    for request in trace.requests:
        for answer in token_steps(request)[0] if times_of(request) else ():
            token_times = [time_s for time_s, _ in answer]
            gaps = np.diff(token_times)
            median_gap = float(np.median(gaps)) if len(gaps) else 0.0
            for index in np.flatnonzero(gaps > LONG_GAP_RATIO * median_gap):
                begin_s, end_s = token_times[index], token_times[index + 1]
                found_spikes.append(Spike(request.index, begin_s, end_s, cause(begin_s, end_s, trace.steps)))
    return found_spikes


def cause(begin_s: float, end_s: float, steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns the cause of a gap between two tokens, from the engine steps in the gap.

    If a step preempted a request, the cause is the preemption.  Otherwise the steps are searched for a prefill or a
    wait for another process, from the step that fills most of the gap on.  Returns "unknown" if none is found."""

    def overlap_s(step: Mapping[str, Any]) -> float:
        return min(end_s, float(step["end_s"])) - max(begin_s, float(step["begin_s"]))

    steps_in_gap = sorted((step for step in steps if overlap_s(step) > 0), key=overlap_s, reverse=True)
    if any(step["preempted"] for step in steps_in_gap):
        return "preemption"
    for step in steps_in_gap:
        if step["prompt_tokens"]:
            return f"prefill of {step['prompt_tokens']} tokens"
        if (step["waited"] or 0.0) > MAX_WAIT_SHARE:
            return "another process"
    return "unknown"

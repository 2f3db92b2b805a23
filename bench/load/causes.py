"""Finds the causes of long gaps between two tokens, from the steps that our server did in the gap (`GET /steps`)."""

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
    """A long gap of one request."""

    request: int
    begin_s: float
    end_s: float
    cause: str

    @property
    def kind(self) -> str:
        """The kind of the cause, one of `KINDS`."""
        return next(kind for kind in KINDS if self.cause.startswith(kind))


def on_our_clock(
    steps: Iterable[Mapping[str, Any]], now_s: float, half_s: float, round_trip_s: float
) -> tuple[dict[str, Any], ...]:
    """The server's steps on the client's clock.  `now_s` was the server's time at `half_s`, half of the round trip.

    If the two clocks differ by less than the round trip, they are taken for one clock of the same host.
    """
    shift = half_s - now_s
    shift = 0.0 if abs(shift) <= round_trip_s else shift
    return tuple({**step, "begin_s": step["begin_s"] + shift, "end_s": step["end_s"] + shift} for step in steps)


def spikes(trace: Trace) -> list[Spike]:
    """The long gaps of all answered requests.  Empty if the server does not report its steps."""
    if trace.steps is None:
        return []
    gaps_found = list[Spike]()
    for request in trace.counted:
        for answer in token_steps(request)[0] if times_of(request) else ():
            times = [time_s for time_s, _ in answer]
            gaps = np.diff(times)
            usual = float(np.median(gaps)) if len(gaps) else 0.0
            for place in np.flatnonzero(gaps > LONG * usual):
                begin, end = times[place], times[place + 1]
                gaps_found.append(Spike(request.index, begin, end, cause(begin, end, trace.steps)))
    return gaps_found


def cause(begin_s: float, end_s: float, steps: Sequence[Mapping[str, Any]]) -> str:
    """The cause of a gap.  A preemption in the gap comes first: it may be of this request, which then computes its
    prompt again.  Then comes the work of the steps, beginning with the step that fills most of the gap."""

    def overlap_s(step: Mapping[str, Any]) -> float:
        return min(end_s, float(step["end_s"])) - max(begin_s, float(step["begin_s"]))

    within = sorted((step for step in steps if overlap_s(step) > 0), key=overlap_s, reverse=True)
    if any(step["preempted"] for step in within):
        return "preemption"
    for step in within:
        if step["prompt_tokens"]:
            return f"prefill of {step['prompt_tokens']} tokens"
        if (step["waited"] or 0.0) > WAITED:
            return "another process"
    return "unknown"

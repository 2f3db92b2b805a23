"""Why a gap between two tokens was long, by the steps that our server did in it (`GET /steps`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooflab.bench.load.metrics import times_of, token_steps
from rooflab.bench.load.trace import Request, Trace

LONG = 1.5
"""A gap is a spike if it is longer than this many medians of its request."""
KINDS = ("prefill", "preemption", "page fault", "another process", "unknown")
"""What a cause begins with."""
WAITED = 0.05
"""Share of a step from which on its threads waited for a core; as in `bench/timing/noise.py`."""


@dataclass(frozen=True)
class Spike:
    """A long gap of one request."""

    request: int
    begin_s: float
    end_s: float
    cause: str

    @property
    def kind(self) -> str:
        """The cause without its numbers, one of `KINDS`."""
        return next(kind for kind in KINDS if self.cause.startswith(kind))


def on_our_clock(
    steps: Iterable[Mapping[str, Any]], now_s: float, half_s: float, round_trip_s: float
) -> tuple[dict[str, Any], ...]:
    """The server's steps on the client's clock: `now_s` was the server's at `half_s`, the middle of the round trip.

    Where the two differ by less than the round trip they are one clock, that of one host.
    """
    shift = half_s - now_s
    shift = 0.0 if abs(shift) <= round_trip_s else shift
    return tuple({**step, "begin_s": step["begin_s"] + shift, "end_s": step["end_s"] + shift} for step in steps)


def spikes(trace: Trace) -> list[Spike]:
    """The long gaps of all answered requests; none where the server does not tell its steps."""
    if trace.steps is None:
        return []
    return [spike for request in trace.counted if times_of(request) for spike in _of(request, trace.steps)]


def _of(request: Request, steps: Sequence[Mapping[str, Any]]) -> Iterable[Spike]:
    times = [time_s for time_s, _ in token_steps(request)[0]]
    gaps = np.diff(times)
    for place in np.flatnonzero(gaps > LONG * np.median(gaps)) if len(gaps) else ():
        begin, end = times[place], times[place + 1]
        yield Spike(request.index, begin, end, cause(begin, end, steps))


def cause(begin_s: float, end_s: float, steps: Sequence[Mapping[str, Any]]) -> str:
    """The cause of a gap.  A preemption in it comes first, for it may be of this request, which then computes its
    prompt again; then what the steps did, beginning with the one that fills most of the gap."""

    def inside(step: Mapping[str, Any]) -> float:
        return min(end_s, float(step["end_s"])) - max(begin_s, float(step["begin_s"]))

    own = sorted((step for step in steps if inside(step) > 0), key=inside, reverse=True)
    if any(step["preempted"] for step in own):
        return "preemption"
    for step in own:
        if step["prompt_tokens"]:
            return f"prefill of {step['prompt_tokens']} tokens"
        if step["evicted"]:
            return f"page fault of the prefix cache, {step['evicted']} pages"
        if (step["waited"] or 0.0) > WAITED:
            return "another process"
    return "unknown"

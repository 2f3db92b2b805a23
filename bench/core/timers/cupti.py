"""The timer that reads kernel times from CUPTI, and therefore knows which kernels ran.

A call's time runs from its first kernel's start to its last kernel's end.  It is not the sum of the kernels' times: the
gaps belong to the cost of several launches, and a sum would count overlapping kernels twice.  The sum is kept too
(`busy_s`), because CUPTI itself may widen the gaps.  Where a sample's kernels differ by name or order from the other
samples' kernels, the reading is invalid and names them: profilers have silently dropped kernels, and then the remaining
time looks like a speedup.  Samples are enqueued behind a wait, as for events; several rounds share one recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rooflab.bench.core.timers.cuda import GRID_CYCLES, GRID_READINGS, EventStopwatch
from rooflab.bench.core.timers.stopwatch import Call, grid_of
from rooflab.bench.core.timers.trace import CALL, DeviceTrace, TracedCall, record_calls, recorded

SHOWN = 3
"""Kernel names, joined for a sentence."""


class CuptiStopwatch(EventStopwatch):
    """Reads the device's kernels from CUPTI, enqueued behind a wait on the device."""

    batches = False  # a kernel's own time is as fine as the device's clock
    rounds_at_once = 8  # a recording takes some milliseconds to start and to read
    title = "cuda cupti, first kernel's start to last kernel's end"

    def __init__(self, *arguments: Any, **named: Any):
        self._traced: dict[str, list[TracedCall]] = {}  # set before the clock's step is read
        super().__init__(*arguments, **named)

    def _read_grid(self) -> float | None:
        waits = [self._wait(1000 + GRID_CYCLES * turn) for turn in range(GRID_READINGS)]
        return grid_of([call.span_s for call in record_calls(waits, self.cuda)])

    def _wait(self, cycles: int) -> Callable[[], None]:
        return lambda: self.cuda.sleep(cycles)

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        return self.rounds([calls])[0]

    def rounds(self, orders: Sequence[Sequence[Call]]) -> list[dict[str, float]]:
        """Reads every function once in each order; a function whose wait ran out is read again."""
        found: list[dict[str, TracedCall]] = [{} for _ in orders]
        with self.cuda.use():
            for name, function, _ in orders[0]:
                self.compile(name, function)
            pending = [(turn, call) for turn, calls in enumerate(orders) for call in calls]
            look = self.observer()
            while pending:
                traced, late = self._record(pending, look)
                for (turn, (name, _, _)), call in zip(pending, traced, strict=True):
                    found[turn][name] = call
                pending, look = late, None
        for calls in found:
            for name, call in calls.items():
                self._traced.setdefault(name, []).append(call)
        return [{name: found[turn][name].span_s for name, _, _ in calls} for turn, calls in enumerate(orders)]

    def _record(
        self, pending: Sequence[tuple[int, Call]], look: Callable[[], None] | None
    ) -> tuple[list[TracedCall], list[tuple[int, Call]]]:
        """One recording of these samples: the kernels that ran, and the samples whose wait ran out."""
        late = []
        with recorded("cuda") as trace:
            for place, (turn, call) in enumerate(pending):
                if not self._enqueue(trace, call):
                    late.append((turn, call))
                ends_round = place + 1 == len(pending) or pending[place + 1][0] != turn
                if look and ends_round:
                    with trace.ours():
                        look()
                        self.cuda.sleep(0)
            with trace.ours():
                self.cuda.sleep(0)
            self.cuda.synchronize()
        return trace.calls(), late

    def _enqueue(self, trace: DeviceTrace, call: Call) -> bool:
        name, function, count = call

        def sample() -> None:
            with trace.ours(CALL):
                self.flush()
                self.cuda.sleep(0)
            for _ in range(count):
                function()

        return self.backlog.enqueue(name, sample, trace.ours)

    def details(self, name: str, samples: int) -> dict[str, Any]:
        """The kernels of a call, the sum of their times, and their fault."""
        last = self._traced.get(name, [])[-samples:]
        if not last:
            return {}
        usual = Counter(call.names for call in last).most_common(1)[0][0]
        return {
            "kernels": usual,
            "busy_s": float(np.median([call.busy_s for call in last])),
            "fault": fault(usual, [call.names for call in last]),
        }


def fault(usual: tuple[str, ...], samples: Sequence[tuple[str, ...]]) -> str:
    """The fault of the kernels recorded for a function's samples, or an empty text."""
    if not usual:
        return "no kernel of it was recorded in most samples; likely cause: another device, or the profiler dropped it"
    others = [names for names in samples if names != usual]
    if not others:
        return ""
    dropped = _shown(Counter(usual) - Counter(others[0]))
    added = _shown(Counter(others[0]) - Counter(usual))
    what = [f"without {dropped}"] * bool(dropped) + [f"with {added}"] * bool(added)
    return (
        f"kernels changed between samples: {len(others)} of {len(samples)} ran "
        f"{' and '.join(what) or 'the same kernels in another order'}"
    )


def _shown(names: Counter[str]) -> str:
    listed = list(names.elements())
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")

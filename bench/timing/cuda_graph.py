"""CUDA-graph replay: the timer of what an engine replays as a graph, without the host between its launches.

One graph is captured for each set of inputs that a function takes in turn (`calls.Rotation.sets`), and samples replay
them in turn; L2 is made cold in front of each replay, outside the pair of events, as for the events alone.  Several
calls in one sample are one graph of as many calls.  What a graph launch costs is its launch floor, read from a graph
of one empty kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from rooflab.bench.timing import tamper
from rooflab.bench.timing.cuda_calls import CudaCalls, NotCaptured
from rooflab.bench.timing.cuda_events import EventStopwatch
from rooflab.bench.timing.flush import FlushBy
from rooflab.bench.timing.stopwatch import Call, Function


class GraphStopwatch(EventStopwatch):
    """Reads pairs of events around replays of captured graphs, enqueued behind a wait on the device."""

    title = "cuda graph replay"

    def __init__(
        self,
        device: torch.device,
        cold: bool = True,
        observe: Callable[[], None] | None = None,
        flush: FlushBy = "read",
        cuda: CudaCalls | None = None,
        clock: Callable[[], float] = tamper.perf_counter,
    ):
        self._graphs: dict[tuple[str, int], Function] = {}
        super().__init__(device, cold, observe, flush, cuda, clock)

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order.

        Raises `ValueError` (`UNSUPPORTED: ...`) naming a function that cannot be captured: one that waits for the
        device, works on a stream that is not joined to the current one, or enqueues nothing there.
        """
        with self.cuda.use():
            replays = [(name, self._replay(name, function, count), 1) for name, function, count in calls]
        return super().round(replays)

    def _replay(self, name: str, function: Function, count: int) -> Function:
        key = (name, count)
        if key not in self._graphs:
            self._graphs[key] = self._capture(name, function, count)
        return self._graphs[key]

    def _capture(self, name: str, function: Function, count: int) -> Function:
        sets = int(getattr(function, "sets", 1)) if count == 1 else 1
        try:
            self.cuda.warm_up(function)
            graphs: list[Callable[[], None]] = [self.cuda.capture(function, count) for _ in range(sets)]
        except NotCaptured as reason:
            raise ValueError(
                f"UNSUPPORTED: {name} cannot be captured in a CUDA graph ({reason}); time it with events"
            ) from reason
        turns = itertools.cycle(graphs)
        return lambda: next(turns)()

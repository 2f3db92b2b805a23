"""A fake CUDA device in Python for the timers: a queue that runs behind the host.  Times are in seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch

from rooflab.bench.core.timers.cuda import NotCaptured
from rooflab.bench.core.timers.cupti import OURS, REST, DeviceTrace


@dataclass
class Work:
    """What the device did once."""

    name: str
    start_s: float
    end_s: float
    stream: int
    grid: tuple[int, int, int] = (1, 1, 1)


class FakeCuda:
    """Stands for `cuda_calls.CudaCalls`.  Its sleep counts 1 GHz; a kernel adds `LAUNCH_S` to what it does."""

    HOST_S = 5e-6
    """What the host needs for each call into CUDA."""
    LAUNCH_S = 0.0
    device = torch.device("cpu")

    def __init__(self, step_s: float = 0.0):
        self.step_s = step_s
        self.host_s = 0.0
        self.device_s = 0.0
        self.log: list[Work] = []
        self.capturing: list[tuple[str, float]] | None = None
        self.captures = 0
        self.uncapturable = ""

    def clock(self) -> float:
        """The host's time."""
        return self.host_s

    def work(self, seconds: float, name: str = "kernel", stream: int = 7, grid: tuple[int, int, int] = (1, 1, 1)):
        """Enqueues one kernel; while a graph is captured, into that."""
        self.host_s += self.HOST_S
        if self.capturing is not None:
            self.capturing.append((name, seconds))
            return
        start = max(self.device_s, self.host_s)
        self.device_s = start + seconds + self.LAUNCH_S
        self.log.append(Work(name, start, self.device_s, stream, grid))

    def use(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def l2_bytes(self) -> int:
        return 4000

    def event(self) -> float:
        self.host_s += self.HOST_S
        self.device_s = max(self.device_s, self.host_s)
        return self.device_s

    def passed(self, event: float) -> bool:
        return self.host_s >= event

    def seconds(self, start: float, end: float) -> float:
        assert self.passed(end), "as CUDA refuses events that the device has not reached"
        read = end - start
        return round(read / self.step_s) * self.step_s if self.step_s else read

    def sleep(self, cycles: int) -> None:
        self.work(cycles / 1e9, "spin")

    def synchronize(self) -> None:
        if self.capturing is not None:
            self.uncapturable = "operation not permitted when stream is capturing"
        self.host_s = max(self.host_s, self.device_s)

    def warm_up(self, function: Callable[[], object]) -> None:
        function()
        self.synchronize()

    def capture(self, function: Callable[[], object], calls: int) -> Callable[[], None]:
        self.captures += 1
        self.capturing, self.uncapturable = [], ""
        for _ in range(calls):
            function()
        nodes, self.capturing = self.capturing, None
        if self.uncapturable:
            raise NotCaptured(self.uncapturable)

        def replay() -> None:
            self.host_s += self.HOST_S
            for name, seconds in nodes:
                self.host_s -= self.HOST_S  # one launch for all
                self.work(seconds, name)

        return replay


class FakeTrace(DeviceTrace):
    """A recording of a `FakeCuda`, in Kineto's form; `lose` drops kernels as a profiler might."""

    def __init__(self, cuda: FakeCuda, lose: Callable[[Work], bool]):
        super().__init__()
        self._cuda, self._lose = cuda, lose
        self._first = len(cuda.log)
        self._own: list[tuple[str, int, int]] = []

    @contextmanager
    def ours(self, kind: str = REST) -> Iterator[None]:
        first = len(self._cuda.log)
        yield
        self._own.append((f"{OURS}{len(self._own)}{kind}", first, len(self._cuda.log)))

    def finish(self) -> None:
        """Writes the events."""
        for work in self._cuda.log[self._first :]:
            if not self._lose(work):
                args = {"grid": list(work.grid), "block": [128, 1, 1], "shared memory": 0}
                self.events.append(self._event("kernel", work.name, work.start_s, work.end_s, work.stream, args))
        for name, first, last in self._own:
            self.events.append(self._event("user_annotation", name, 0, 0, 1, {}))
            kernels = [work for work in self._cuda.log[first:last] if not self._lose(work)]
            if kernels:
                ends = (min(work.start_s for work in kernels), max(work.end_s for work in kernels))
                self.events.append(self._event("gpu_user_annotation", name, *ends, kernels[0].stream, {}))

    def _event(self, category: str, name: str, start_s: float, end_s: float, tid: int, args: dict[str, Any]) -> Any:
        epoch = Decimal(1_790_857_026_000_000)  # microseconds that no float holds to the nanosecond
        around = 1 if category == "gpu_user_annotation" else 0  # nanoseconds that Kineto adds on either side
        start, end = round(start_s * 1e9) - around, round(end_s * 1e9) + around
        times = {"ts": epoch + Decimal(start) / 1000, "dur": Decimal(end - start) / 1000}
        return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "args": args, **times}


def recorder(cuda: FakeCuda, lose: Callable[[Work], bool] = lambda work: False) -> Callable[..., Any]:
    """Stands for `cupti.recorded`; counts its recordings in `recorder.count`."""

    @contextmanager
    def recorded(_: Any) -> Iterator[FakeTrace]:
        trace = FakeTrace(cuda, lose)
        recorded.count += 1  # type: ignore[attr-defined]
        yield trace
        with trace.ours():
            cuda.sleep(0)
        cuda.synchronize()
        trace.finish()

    recorded.count = 0  # type: ignore[attr-defined]
    return recorded

"""A fake CUDA device in Python for the timers: a queue that runs behind the host.  Times are in seconds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Work:
    """What the device did once."""

    name: str
    start_s: float
    end_s: float
    stream: int
    grid: tuple[int, int, int] = (1, 1, 1)


class FakeCuda:
    """Stands for `cuda.CudaCalls`.  Its sleep counts 1 GHz; a kernel adds `LAUNCH_S` to what it does."""

    HOST_S = 5e-6
    """What the host needs for each call into CUDA."""
    LAUNCH_S = 0.0
    device = torch.device("cpu")

    def __init__(self, step_s: float = 0.0):
        self.step_s = step_s
        self.host_s = 0.0
        self.device_s = 0.0
        self.log: list[Work] = []

    def clock(self) -> float:
        """The host's time."""
        return self.host_s

    def work(self, seconds: float, name: str = "kernel", stream: int = 7, grid: tuple[int, int, int] = (1, 1, 1)):
        """Enqueues one kernel."""
        self.host_s += self.HOST_S
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
        self.host_s = max(self.host_s, self.device_s)


class Recording:
    """Stands for a recording of Kineto: the work of a `FakeCuda` from its beginning on, in Chrome's trace format."""

    def __init__(self, cuda: FakeCuda):
        self._cuda, self._first = cuda, len(cuda.log)

    def export_chrome_trace(self, path: str) -> None:
        events: list[Any] = [{"ph": "M", "name": "process_name"}]
        for work in reversed(self._cuda.log[self._first :]):  # a trace is not in the order of time
            args = {"grid": list(work.grid), "block": [128, 1, 1], "shared memory": 0}
            times = {"ts": work.start_s * 1e6, "dur": (work.end_s - work.start_s) * 1e6}
            events.append({"ph": "X", "cat": "kernel", "name": work.name, "args": args, **times})
        Path(path).write_text(json.dumps({"traceEvents": events}))


def profiler_of(cuda: FakeCuda, running: bool = False) -> Callable[..., Any]:
    """Stands for `activity.profiled`; `running`: another profiler runs already."""

    @contextmanager
    def profiled() -> Iterator[Recording | None]:
        yield None if running else Recording(cuda)

    return profiled

"""What the device did, from CUPTI: its kernels by name, with their times, grids and blocks, call by call.

Kineto, the recorder behind `torch.profiler`, writes a trace; here it is run, read and cut into calls.  It is entered
through `torch.autograd.profiler`, because `torch.profiler` imports torch's compiler, and with it Triton, which would
fix Triton's mode for the process (and takes a second).

Whose kernel is whose: our own flushes and waits are enqueued inside annotated stretches of host time, and CUPTI says
which kernels each stretch has enqueued, as an interval of device time on our stream.  Every other kernel is the timed
function's, and belongs to the call between whose stretches it started.  Names do not enter into it: a function may
well call the very kernels that a flush does.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from rooflab.bench.timing.cuda_calls import CudaCalls

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of what a device does in order."""
OURS = "rooflab: "
"""Beginning of our annotations' names; a number and one of the following end them."""
CALL, REST = " call follows", " rest"
_profile, _record_function = profiler.profile, profiler.record_function
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class NotRecorded(ValueError):
    """The profiler did not record what the device did, so that nothing can be said of it."""


@dataclass(frozen=True)
class DeviceKernel:
    """One kernel, copy or fill that the device ran."""

    name: str
    start_ns: int
    end_ns: int
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared_bytes: int = 0
    """Per block, static and dynamic."""
    nbytes: int = 0
    """Of a copy or fill."""


@dataclass(frozen=True)
class TracedCall:
    """What the device did for one call, in order of time."""

    kernels: tuple[DeviceKernel, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels' names."""
        return tuple(kernel.name for kernel in self.kernels)

    @property
    def span_s(self) -> float:
        """From the first kernel's start to the last one's end; 0 where there is none."""
        if not self.kernels:
            return 0.0
        return (max(kernel.end_ns for kernel in self.kernels) - min(kernel.start_ns for kernel in self.kernels)) * 1e-9

    @property
    def busy_s(self) -> float:
        """The kernels' own times added up, without the gaps between them."""
        return sum(kernel.end_ns - kernel.start_ns for kernel in self.kernels) * 1e-9


@dataclass
class Trace:
    """A recording; its events are there once the recording has ended."""

    events: list[dict[str, Any]] = field(default_factory=list)
    _stretches: int = 0

    @contextmanager
    def ours(self, kind: str = REST) -> Iterator[None]:
        """Annotates host time in which the device is given work of ours, a kernel at least."""
        self._stretches += 1
        with _record_function(f"{OURS}{self._stretches}{kind}"):
            yield

    def calls(self) -> list[TracedCall]:
        """The timed calls in the order in which they were enqueued."""
        return cut(self.events)


@contextmanager
def recorded(device_type: str, memory: bool = False) -> Iterator[Trace]:
    """Records what is done inside `with`: on a `cuda` device its kernels too, with `memory` every allocation on a CPU.

    Leaving it waits for the device.  Raises `NotRecorded` where torch's profiler runs already.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes two lines to standard error for every recording
    trace = Trace()
    use_device = "cuda" if device_type == "cuda" else None
    if _profiler_enabled():
        raise NotRecorded("cupti: expected no other profiler, and one of torch's runs already")
    with _profile(use_device=use_device, use_kineto=True, profile_memory=memory) as recording:
        yield trace
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(path))
        # As decimals: microseconds since 1970 or a late epoch have more digits than a float holds.
        trace.events = json.loads(path.read_text(errors="replace"), parse_float=Decimal)["traceEvents"]


def record_calls(
    calls: Sequence[Callable[[], object]], cuda: CudaCalls, before: Callable[[], None] = lambda: None
) -> list[TracedCall]:
    """What the device does for each of `calls`, one after another; `before` runs in front of each, as ours."""
    with recorded("cuda") as trace:
        for call in calls:
            with trace.ours(CALL):
                before()
                cuda.sleep(0)
            call()
        with trace.ours():
            cuda.sleep(0)
        cuda.synchronize()
    return trace.calls()


def cut(events: Iterable[Mapping[str, Any]]) -> list[TracedCall]:
    """The calls of a trace in Chrome's format.

    Raises `NotRecorded` where a stretch of ours left no kernel in the trace: then nothing can be told apart.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    wanted = {str(event["name"]) for event in complete if _is_ours(event, "user_annotation")}
    stretches = sorted((event for event in complete if _is_ours(event, "gpu_user_annotation")), key=_start)
    missing = wanted - {str(event["name"]) for event in stretches}
    if missing or not wanted:
        raise NotRecorded(
            f"cupti: expected the profiler to record the device's work, and it recorded none of {len(missing)} of "
            f"{len(wanted)} launches of ours; CUPTI must be there, and no other profiler attached"
        )
    theirs = [event for event in complete if event.get("cat") in DEVICE_EVENTS]
    theirs = [event for event in theirs if not any(_inside(event, stretch) for stretch in stretches)]
    ends = [_start(stretch) for stretch in stretches[1:]] + [None]
    return [
        TracedCall(_between(theirs, _start(stretch), end))
        for stretch, end in zip(stretches, ends, strict=True)
        if str(stretch["name"]).endswith(CALL)
    ]


def _is_ours(event: Mapping[str, Any], category: str) -> bool:
    return event.get("cat") == category and str(event["name"]).startswith(OURS)


def _inside(event: Mapping[str, Any], stretch: Mapping[str, Any]) -> bool:
    """Whether a kernel is of a stretch: on its stream, where a stream's kernels run one after another, and in it."""
    same = (event["pid"], event["tid"]) == (stretch["pid"], stretch["tid"])
    return same and _start(stretch) <= _start(event) and _end(event) <= _end(stretch)


def _between(events: Iterable[Mapping[str, Any]], start: int, end: int | None) -> tuple[DeviceKernel, ...]:
    found = (event for event in events if start <= _start(event) and (end is None or _start(event) < end))
    return tuple(sorted(map(_kernel, found), key=lambda kernel: (kernel.start_ns, kernel.end_ns)))


def _kernel(event: Mapping[str, Any]) -> DeviceKernel:
    args = event["args"]
    return DeviceKernel(
        name=str(event["name"]),
        start_ns=_start(event),
        end_ns=_end(event),
        grid=tuple(int(size) for size in args.get("grid", ())),
        block=tuple(int(size) for size in args.get("block", ())),
        shared_bytes=int(args.get("shared memory", 0)),
        nbytes=int(args.get("bytes", 0)),
    )


def _start(event: Mapping[str, Any]) -> int:
    return int(event["ts"] * 1000)


def _end(event: Mapping[str, Any]) -> int:
    return _start(event) + int(event["dur"] * 1000)

"""The timer that reads kernel times from CUPTI, which kernels a call ran, and what their code was.

Kineto, the recorder behind `torch.profiler`, writes a trace, which is read and split into calls.  How kernels are
assigned to calls: the bench enqueues its own flushes and waits inside annotated stretches of host time.  CUPTI reports
the kernels of each stretch as an interval of device time on our stream.  Every other kernel belongs to the timed
function, and to the call after whose stretch it started.  Kernel names are not used, because a function may call the
same kernels as a flush.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import torch

from rooflab.bench.base.cubin import code_hash
from rooflab.bench.base.plain import JsonObject
from rooflab.bench.core.noise import Samples
from rooflab.bench.core.timers import Call, Function, NotRecorded, Observed, bound, grid_of
from rooflab.bench.core.timers.cpu import profiled
from rooflab.bench.core.timers.cuda import GRID, CudaCalls, EventTimer
from rooflab.kernels.registry import interpreting

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from rooflab.kernels._cuda import CudaKernel

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of device work."""
OURS = "rooflab: "
"""Prefix of our annotations' names; a number and then `CALL` or `REST` follow."""
CALL, REST = " call follows", " rest"
SHOWN = 3
"""Kernel names, joined for a sentence."""
(_record_function,) = bound("torch.autograd.profiler", "record_function")
_cuda: Any = torch.cuda


class DeviceKernel(NamedTuple):
    """One kernel, copy or fill that the device ran."""

    name: str
    start_ns: int
    end_ns: int
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared_bytes: int = 0
    """Shared memory per block, static and dynamic, in bytes."""
    nbytes: int = 0
    """Bytes of a copy or fill."""


Traced = tuple[DeviceKernel, ...]
"""The device's work for one call, in time order."""


class DeviceTrace:
    """A recording; `events` is filled when the recording ends."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._stretches = 0

    @contextmanager
    def ours(self, kind: str = REST) -> Iterator[None]:
        """Annotates host time in which the bench enqueues its own work: at least one kernel."""
        self._stretches += 1
        with cast(AbstractContextManager[object], _record_function(f"{OURS}{self._stretches}{kind}")):
            yield


@contextmanager
def recorded(cuda: CudaCalls) -> Iterator[DeviceTrace]:
    """Records the CUDA kernels that run inside `with`.  Raises `NotRecorded` where torch's profiler runs already."""
    trace = DeviceTrace()
    with profiled("cuda") as recording:
        yield trace
        with trace.ours():
            cuda.sleep(0)
        cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        cast(Any, recording).export_chrome_trace(str(path))
        # Parsed as decimals: timestamps in microseconds have more digits than a float holds.
        trace.events = json.loads(path.read_text(errors="replace"), parse_float=Decimal)["traceEvents"]


def cut(events: Iterable[JsonObject]) -> list[Traced]:
    """The calls of a trace in Chrome's format.

    Raises `NotRecorded` where an annotated stretch of ours has no kernel in the trace: calls cannot be separated then.
    """
    spans = [(int(event["ts"] * 1000), int(event["dur"] * 1000), event) for event in events if event.get("ph") == "X"]
    spans.sort(key=lambda span: span[:2])
    ours = [span for span in spans if str(span[2]["name"]).startswith(OURS)]
    wanted = {event["name"] for _, _, event in ours if event["cat"] == "user_annotation"}
    stretches = [span for span in ours if span[2]["cat"] == "gpu_user_annotation"]
    missing = wanted - {event["name"] for _, _, event in stretches}
    if missing or not wanted:
        raise NotRecorded(
            f"cupti: expected the profiler to record the device's work, and it recorded none of {len(missing)} of "
            f"{len(wanted)} launches of ours; CUPTI must be there, and no other profiler attached"
        )
    starts = [start for start, _, _ in stretches]
    found: list[list[DeviceKernel]] = [[] for _ in stretches]
    for start, took, event in spans:
        place = bisect_right(starts, start) - 1  # of the last stretch that has begun; stretches do not overlap
        if event.get("cat") not in DEVICE_EVENTS or place < 0:
            continue
        began, lasted, stretch = stretches[place]
        on_its_stream = (event["pid"], event["tid"]) == (stretch["pid"], stretch["tid"])
        if not (on_its_stream and start + took <= began + lasted):
            args = event["args"]
            grid, block = (tuple(map(int, args.get(name, ()))) for name in ("grid", "block"))
            sizes = int(args.get("shared memory", 0)), int(args.get("bytes", 0))
            found[place].append(DeviceKernel(str(event["name"]), start, start + took, grid, block, *sizes))
    calls = [str(event["name"]).endswith(CALL) for _, _, event in stretches]
    return [tuple(kernels) for kernels in itertools.compress(found, calls)]


def span_s(call: Traced) -> float:
    """Seconds from the first kernel's start to the last kernel's end; 0 without a kernel."""
    return (max(kernel.end_ns for kernel in call) - call[0].start_ns) * 1e-9 if call else 0.0


def names(call: Traced) -> tuple[str, ...]:
    """The kernels' names."""
    return tuple(kernel.name for kernel in call)


class CuptiTimer(EventTimer):
    """Reads the device's kernels from CUPTI, enqueued behind a wait on the device; several rounds share a recording.

    A call's time runs from its first kernel's start to its last kernel's end.  It is not the sum of the kernels' times:
    the gaps belong to the cost of several launches, and a sum would count overlapping kernels twice.  The sum is kept
    too (`busy_s`), because CUPTI itself may widen the gaps.  Where a sample's kernels differ by name or order from the
    other samples' kernels, the reading is invalid and names them: profilers have silently dropped kernels, and then the
    remaining time looks like a speedup.
    """

    batches = False  # a kernel's own time is as fine as the device's clock
    rounds_at_once = 8  # a recording takes some milliseconds to start and to read
    title = "cuda cupti, first kernel's start to last kernel's end"

    def __init__(self, cuda: CudaCalls, cold: bool = True, flush: str = "read"):
        self.traced: defaultdict[str, list[Traced]] = defaultdict(list)
        """The readings of each function, in time order."""
        super().__init__(cuda, cold, flush)

    def _read_grid(self) -> float | None:
        waits = self.rounds([[("a wait", partial(self.cuda.sleep, cycles), 1)] for cycles in GRID])
        return grid_of([seconds for read in waits for seconds in read.values()])

    def round(self, calls: Sequence[Call], observe: Function | None = None) -> dict[str, float]:
        return self.rounds([calls], observe)[0]

    def rounds(self, orders: Sequence[Sequence[Call]], observe: Function | None = None) -> list[dict[str, float]]:
        """Reads every function once in each order; a function whose wait ran out is read again."""
        found: list[dict[str, Traced]] = [{} for _ in orders]
        pending = [(turn, call) for turn, calls in enumerate(orders) for call in calls]
        with self.cuda.use():
            while pending:
                late = []
                with recorded(self.cuda) as trace:
                    for turn, group in itertools.groupby(pending, key=lambda one: one[0]):
                        for _, call in group:
                            sample = partial(self._sample_in, trace, call)
                            if not self.enqueue(call[0], sample, trace.ours)[0]:
                                late.append((turn, call))
                        if observe:
                            with trace.ours():
                                observe()
                                self.cuda.sleep(0)
                for (turn, call), traced in zip(pending, cut(trace.events), strict=True):
                    found[turn][call[0]] = traced
                pending, observe = late, None
        for read in found:
            for name, traced in read.items():
                self.traced[name].append(traced)
        return [{name: span_s(read[name]) for name, _, _ in calls} for read, calls in zip(found, orders, strict=True)]

    def _sample_in(self, trace: DeviceTrace, call: Call) -> None:
        with trace.ours(CALL):
            self.flush()
            self.cuda.sleep(0)
        for _ in range(call[2]):
            call[1]()

    def completed(self, name: str, samples: Samples) -> Samples:
        """The samples with the sum of the kernels' times, and their fault."""
        last = self.traced[name][-len(samples.seconds) :]
        busy_s = [sum(kernel.end_ns - kernel.start_ns for kernel in call) * 1e-9 for call in last]
        return replace(samples, busy_s=float(np.median(busy_s)), fault=fault([names(call) for call in last]))


def fault(samples: Sequence[tuple[str, ...]]) -> str:
    """The fault of the kernels whose names were recorded for a function's samples, or an empty text."""
    usual = Counter(samples).most_common(1)[0][0]
    if not usual:
        return "no kernel of it was recorded in most samples; likely cause: another device, or the profiler dropped it"
    others = [ran for ran in samples if ran != usual]
    if not others:
        return ""
    dropped = _shown(Counter(usual) - Counter(others[0]))
    added = _shown(Counter(others[0]) - Counter(usual))
    what = [f"without {dropped}"] * bool(dropped) + [f"with {added}"] * bool(added)
    return (
        f"kernels changed between samples: {len(others)} of {len(samples)} ran "
        f"{' and '.join(what) or 'the same kernels in another order'}"
    )


def _shown(kernels: Counter[str]) -> str:
    listed = list(kernels.elements())
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def observed_on_cuda(call: Function, cuda: CudaCalls) -> Observed:
    """The peak memory of one `call` and the device's work of the next: the first one may compile and tune.

    The peak is that of torch's allocator, minus the bytes of the result, which is alive until the peak is read.  There
    are no kernels and no hash where CUPTI records nothing.  Raises whatever `call` raises.
    """
    with cuda.use():
        cuda.synchronize()
        _cuda.reset_peak_memory_stats(cuda.device)
        before = _cuda.memory_allocated(cuda.device)
        result = call()
        cuda.synchronize()
        peak, after = _cuda.max_memory_allocated(cuda.device), _cuda.memory_allocated(cuda.device)
        del result
        seen = Observed(float(max(0, peak - max(after, before))))
        with suppress(NotRecorded):
            with launched_code() as launched, recorded(cuda) as trace:
                with trace.ours(CALL):
                    cuda.sleep(0)
                call()
            (traced,) = cut(trace.events)
            seen = replace(seen, device_kernels=names(traced), activity_hash=activity_hash(traced, launched))
    return seen


def activity_hash(kernels: Sequence[DeviceKernel], launched: Sequence[tuple[str, str]] = ()) -> str | None:
    """The hash over `kernels`, None without any; `launched` holds, in order, name and code hash of known launches.

    A kernel's code enters the hash if every launch of its name was seen; else only the kernel's name does.
    """
    if not kernels:
        return None
    runs = Counter(kernel.name for kernel in kernels)
    codes: defaultdict[str, list[str]] = defaultdict(list)
    for name, code in launched:
        codes[name].append(code)
    known = {name: iter(found) for name, found in codes.items() if len(found) == runs[name]}
    rows = [[kernel.name, next(known[kernel.name]) if kernel.name in known else "", *kernel[3:]] for kernel in kernels]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@contextmanager
def launched_code() -> Iterator[list[tuple[str, str]]]:
    """Gathers name and code hash of every Triton, Gluon and CUDA C++ kernel launched inside `with`, in order."""
    launched: list[tuple[str, str]] = []

    def noting(
        owner: type, method: str, code_of: Callable[..., tuple[str, str] | None]
    ) -> AbstractContextManager[object]:
        original = getattr(owner, method)

        def launch(self: object, *args: object, **kwargs: object) -> object:
            result = original(self, *args, **kwargs)
            launched.extend(filter(None, [code_of(self, result, kwargs)]))
            return result

        return patch.object(owner, method, launch)

    triton = sys.modules.get("triton.runtime.jit")
    cuda = sys.modules.get("rooflab.kernels._cuda")  # present only where a kernel has imported it: needs CuPy
    with ExitStack() as stack:
        if triton is not None and not interpreting():
            stack.enter_context(noting(triton.JITFunction, "run", _of_triton))
        if cuda is not None:
            stack.enter_context(noting(cuda.CudaKernel, "__call__", _of_cuda))
        yield launched


def _of_triton(
    function: object, kernel: CompiledKernel | None, options: Mapping[str, object]
) -> tuple[str, str] | None:
    if kernel is None or options.get("warmup"):  # it was only compiled
        return None
    return str(kernel.metadata.name), code_hash(kernel.asm["cubin"])


def _of_cuda(kernel: CudaKernel, result: None, options: Mapping[str, object]) -> tuple[str, str]:
    from rooflab.kernels._cuda import architecture, cubin_file

    file = cubin_file(kernel.source, arch=architecture(), options=kernel.options)  # already compiled and cached
    return kernel.name, code_hash(file.read_bytes())

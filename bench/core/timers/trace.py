"""Records by CUPTI which kernels a call ran, with names, times, grids and blocks; also records a call's peak memory.

Kineto, the recorder behind `torch.profiler`, writes a trace.  This module runs Kineto, reads the trace and splits it
into calls.  It uses `torch.autograd.profiler`, because `torch.profiler` imports torch's compiler and thereby Triton:
that import would fix Triton's mode for the process, and takes 1 s.

How kernels are assigned to calls: the bench enqueues its own flushes and waits inside annotated stretches of host time.
CUPTI reports the kernels of each stretch as an interval of device time on our stream.  Every other kernel belongs to
the timed function, and to the call after whose stretch it started.  Kernel names are not used, because a function may
call the same kernels as a flush.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from rooflab.bench.core.timers.cuda import CudaCalls
from rooflab.kernels.registry import interpreting

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of device work."""
OURS = "rooflab: "
"""Prefix of our annotations' names; a number and then `CALL` or `REST` follow."""
CALL, REST = " call follows", " rest"
_profile, _record_function = profiler.profile, profiler.record_function
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class NotRecorded(ValueError):
    """The profiler did not record the device's work."""


@dataclass(frozen=True)
class DeviceKernel:
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


@dataclass(frozen=True)
class TracedCall:
    """The device's work for one call, in time order."""

    kernels: tuple[DeviceKernel, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(kernel.name for kernel in self.kernels)

    @property
    def span_s(self) -> float:
        """Seconds from the first kernel's start to the last kernel's end; 0 without a kernel."""
        if not self.kernels:
            return 0.0
        return (max(kernel.end_ns for kernel in self.kernels) - min(kernel.start_ns for kernel in self.kernels)) * 1e-9

    @property
    def busy_s(self) -> float:
        """Sum of the kernels' times in seconds, without the gaps between kernels."""
        return sum(kernel.end_ns - kernel.start_ns for kernel in self.kernels) * 1e-9


@dataclass
class DeviceTrace:
    """A recording; `events` is filled when the recording ends."""

    events: list[dict[str, Any]] = field(default_factory=list)
    _stretches: int = 0

    @contextmanager
    def ours(self, kind: str = REST) -> Iterator[None]:
        """Annotates host time in which the bench enqueues its own work: at least one kernel."""
        self._stretches += 1
        with _record_function(f"{OURS}{self._stretches}{kind}"):
            yield

    def calls(self) -> list[TracedCall]:
        """The timed calls in the order in which they were enqueued."""
        return cut(self.events)


@contextmanager
def recorded(device_type: str, memory: bool = False) -> Iterator[DeviceTrace]:
    """Records the work inside `with`: kernels on a `cuda` device, and with `memory` every allocation on a CPU.

    Leaving the block waits for the device.  Raises `NotRecorded` where torch's profiler runs already.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else Kineto writes two lines to standard error per recording
    trace = DeviceTrace()
    use_device = "cuda" if device_type == "cuda" else None
    if _profiler_enabled():
        raise NotRecorded("cupti: expected no other profiler, and one of torch's runs already")
    with _profile(use_device=use_device, use_kineto=True, profile_memory=memory) as recording:
        yield trace
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(path))
        # Parsed as decimals: timestamps in microseconds have more digits than a float holds.
        trace.events = json.loads(path.read_text(errors="replace"), parse_float=Decimal)["traceEvents"]


def record_calls(
    calls: Sequence[Callable[[], object]], cuda: CudaCalls, before: Callable[[], None] = lambda: None
) -> list[TracedCall]:
    """The device's work for each of `calls`, in order; `before` runs before each call and counts as our work."""
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

    Raises `NotRecorded` where an annotated stretch of ours has no kernel in the trace: calls cannot be separated then.
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
    """Whether a kernel belongs to a stretch: it ran on the stretch's stream and within its interval."""
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


CODE_SECTIONS = (".text.", ".nv.constant", ".nv.global.init", ".rodata")
"""Name prefixes of the cubin sections that hold instructions and constants."""


@dataclass(frozen=True)
class Activity:
    """The device's kernels of one call, in order."""

    kernels: tuple[str, ...]
    """The kernels' names."""
    hash: str | None
    """SHA-256 over names, code, grids, blocks and shared memory in order; None where nothing was recorded."""


def device_activity(function: Callable[[], object], device: torch.device, cuda: CudaCalls | None = None) -> Activity:
    """The work of a CUDA device for one call of `function`, after a first call, which may compile and tune.

    Raises `NotRecorded` where CUPTI records nothing, and whatever `function` raises.
    """
    cuda = cuda or CudaCalls(device)
    with cuda.use():
        function()
        cuda.synchronize()
        with launched_code() as launched:
            (call,) = record_calls([function], cuda)
    return Activity(call.names, activity_hash(call.kernels, launched))


def activity_hash(kernels: Sequence[DeviceKernel], launched: Sequence[tuple[str, str]] = ()) -> str | None:
    """The hash over `kernels`; `launched` holds, in order, name and code hash of the launches whose code is known.

    A kernel's code enters the hash if every launch of its name was seen; else only the kernel's name does.
    """
    if not kernels:
        return None
    runs = Counter(kernel.name for kernel in kernels)
    codes: dict[str, list[str]] = {}
    for name, code in launched:
        codes.setdefault(name, []).append(code)
    known = {name: iter(found) for name, found in codes.items() if len(found) == runs[name]}
    rows = [
        [
            kernel.name,
            next(known[kernel.name]) if kernel.name in known else "",
            *([list(kernel.grid), list(kernel.block), kernel.shared_bytes, kernel.nbytes]),
        ]
        for kernel in kernels
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@contextmanager
def launched_code() -> Iterator[list[tuple[str, str]]]:
    """Gathers name and code hash of every Triton, Gluon and CUDA C++ kernel launched inside `with`, in order."""
    launched: list[tuple[str, str]] = []
    with ExitStack() as stack:
        triton = sys.modules.get("triton.runtime.jit")
        if triton is not None and not interpreting():
            stack.enter_context(_noting(triton.JITFunction, "run", _of_triton, launched))
        cuda = sys.modules.get("rooflab.kernels._cuda")  # present only where a kernel has imported it: needs CuPy
        if cuda is not None:
            stack.enter_context(_noting(cuda.CudaKernel, "__call__", _of_cuda, launched))
        yield launched


@contextmanager
def _noting(
    owner: Any, method: str, note: Callable[..., tuple[str, str] | None], launched: list[tuple[str, str]]
) -> Iterator[None]:
    """Wraps `owner`'s method: each call appends what `note` returns for self, the result and the keywords."""
    original = getattr(owner, method)

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        found = note(self, result, kwargs)
        if found is not None:
            launched.append(found)
        return result

    setattr(owner, method, noting)
    try:
        yield
    finally:
        setattr(owner, method, original)


def _of_triton(function: Any, kernel: Any, options: Mapping[str, Any]) -> tuple[str, str] | None:
    if kernel is None or options.get("warmup"):
        return None
    return str(kernel.metadata.name), code_hash(kernel.asm["cubin"])


def _of_cuda(kernel: Any, result: None, options: Mapping[str, Any]) -> tuple[str, str]:
    from rooflab.kernels._cuda import architecture, cubin_file

    file = cubin_file(kernel.source, arch=architecture(), options=kernel.options)  # already compiled and cached
    return kernel.name, code_hash(file.read_bytes())


def code_hash(cubin: bytes) -> str:
    """SHA-256 over a cubin's instructions and constants.  Raises `ValueError` unless it is a 64-bit ELF file."""
    sections = elf_sections(cubin)
    digest = hashlib.sha256()
    for name in sorted(sections):
        if name.startswith(CODE_SECTIONS):
            digest.update(f"{name}:{len(sections[name])}:".encode() + sections[name])
    return digest.hexdigest()


def elf_sections(binary: bytes) -> Mapping[str, bytes]:
    """The sections of a little-endian 64-bit ELF file by name (System V ABI, "Sections")."""
    if binary[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"cubin: expected a little-endian 64-bit ELF file, got {binary[:6]!r}")
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    entry, count, names_index = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, table + entry * index) for index in range(count)]
    _, _, _, _, names_at, names_size = headers[names_index]
    names = binary[names_at : names_at + names_size]
    found = {}
    for name_at, kind, _, _, offset, size in headers:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        found[name] = b"" if kind == 8 else binary[offset : offset + size]  # 8 (NOBITS): no bytes in the file
    return found


_cuda: Any = torch.cuda


def peak_memory_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Peak bytes that one `call` held, minus the bytes of its result, which is alive until the peak is read."""
    return _on_cuda(call, device) if device.type == "cuda" else _on_cpu(call)


def _on_cuda(call: Callable[[], object], device: torch.device) -> float:
    _cuda.synchronize(device)
    _cuda.reset_peak_memory_stats(device)
    before = _cuda.memory_allocated(device)
    result = call()
    _cuda.synchronize(device)
    peak, after = _cuda.max_memory_allocated(device), _cuda.memory_allocated(device)
    del result
    return float(max(0, peak - max(after, before)))


def _on_cpu(call: Callable[[], object]) -> float:
    with recorded("cpu", memory=True) as trace:
        result = call()
    changes = sorted(
        (event["ts"], int(event["args"]["Bytes"]))
        for event in trace.events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
    )
    del result
    held = list(itertools.accumulate((change for _, change in changes), initial=0))
    return float(max(0, max(held) - max(held[-1], 0)))

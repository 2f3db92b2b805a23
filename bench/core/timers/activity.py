"""Measures one call on a GPU: its peak memory, its device kernels (from CUPTI), and a hash of the kernels' code."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest.mock import patch

import torch

from rooflab.bench.base.cubin import code_hash
from rooflab.bench.base.plain import JsonObject
from rooflab.bench.core.timers import Function, bound
from rooflab.bench.core.timers.cuda import CudaCalls
from rooflab.kernels.registry import interpreting

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from rooflab.kernels._cuda import CudaKernel

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of events that are device work in Kineto's traces."""
_cuda: Any = torch.cuda


class DeviceKernel(NamedTuple):
    """Describes one kernel, copy or memory fill that the device ran."""

    name: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared_bytes: int = 0
    """Shared memory per thread block, static and dynamic, in bytes."""
    nbytes: int = 0
    """Bytes of a copy or of a memory fill."""


@contextmanager
def profiled() -> Iterator[torch.autograd.profiler.profile | None]:
    """Records the device's work with Kineto, the recorder of `torch.profiler`.  Yields None if another profiler runs.

    `torch.profiler` is not used, because it imports Triton, which takes 1 s.  After that import, this process can no
    longer choose whether Triton interprets kernels."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else Kineto writes two lines to standard error per recording
    if torch._C._autograd._profiler_enabled():
        yield None
        return
    (profile_class,) = bound("torch.autograd.profiler", "profile")
    with cast(torch.autograd.profiler.profile, profile_class(use_device="cuda", use_kineto=True)) as device_recording:
        yield device_recording


def observed(call: Function, cuda: CudaCalls) -> dict[str, Any]:
    """Calls `call` twice.  Returns the first call's peak memory, and the second call's device kernels and their hash.

    The first call may compile and tune.  The peak is that of torch's allocator.  It counts neither the call's result
    nor earlier allocations.  If nothing is recorded, there are no kernels and no hash.  Raises the errors of `call`."""
    with cuda.use():
        cuda.synchronize()
        _cuda.reset_peak_memory_stats(cuda.device)
        start_bytes = _cuda.memory_allocated(cuda.device)
        call_result = call()
        cuda.synchronize()
        peak_bytes, end_bytes = _cuda.max_memory_allocated(cuda.device), _cuda.memory_allocated(cuda.device)
        del call_result
        with launched_code() as launch_hashes, profiled() as device_recording:
            call()
            cuda.synchronize()
    kernels = kernels_in(_events(device_recording)) if device_recording else []
    return {
        "peak_memory_bytes": float(max(0, peak_bytes - max(end_bytes, start_bytes))),
        "device_kernels": tuple(kernel.name for kernel in kernels),
        "activity_hash": activity_hash(kernels, launch_hashes),
    }


def _events(recording: torch.autograd.profiler.profile) -> list[JsonObject]:
    """Returns the events of a profiler recording, in Chrome's trace format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        cast(Any, recording).export_chrome_trace(str(path))
        # Parsed as decimals: timestamps in microseconds have more digits than a float holds.
        events: list[JsonObject] = json.loads(path.read_text(errors="replace"), parse_float=Decimal)["traceEvents"]
    return events


def kernels_in(events: Iterable[JsonObject]) -> list[DeviceKernel]:
    """Returns the device's kernels, copies and fills in a trace, in the order of their start times."""
    device_events = [event for event in events if event.get("ph") == "X" and event.get("cat") in DEVICE_EVENTS]
    kernels = []
    for event in sorted(device_events, key=lambda event: event["ts"]):
        event_args = event["args"]
        grid, block = (tuple(map(int, event_args.get(name, ()))) for name in ("grid", "block"))
        byte_sizes = int(event_args.get("shared memory", 0)), int(event_args.get("bytes", 0))
        kernels.append(DeviceKernel(str(event["name"]), grid, block, *byte_sizes))
    return kernels


def activity_hash(kernels: Sequence[DeviceKernel], launched: Sequence[tuple[str, str]] = ()) -> str | None:
    """Returns a hash of the device kernels, or None if there are no kernels.

    The hash covers each kernel's name, grid, block and byte counts.  `launched` lists pairs `(kernel name, hash of its
    code)`.  A code hash is included only if `launched` and `kernels` contain its kernel equally often."""
    if not kernels:
        return None
    run_counts = Counter(kernel.name for kernel in kernels)
    hashes_by_name: defaultdict[str, list[str]] = defaultdict(list)
    for name, launch_hash in launched:
        hashes_by_name[name].append(launch_hash)
    hash_map = {name: iter(hashes) for name, hashes in hashes_by_name.items() if len(hashes) == run_counts[name]}
    kernel_rows = [
        [kernel.name, next(hash_map[kernel.name]) if kernel.name in hash_map else "", *kernel[1:]] for kernel in kernels
    ]
    return hashlib.sha256(json.dumps(kernel_rows, separators=(",", ":")).encode()).hexdigest()


@contextmanager
def launched_code() -> Iterator[list[tuple[str, str]]]:
    """Yields a list.  Each launch of Triton, Gluon or CUDA C++ inside `with` adds a pair `(kernel_name, code_hash)`."""
    launch_hashes: list[tuple[str, str]] = []

    def noting(
        owner: type, method: str, code_of: Callable[..., tuple[str, str] | None]
    ) -> AbstractContextManager[object]:
        original_method = getattr(owner, method)

        def launch(self: object, *args: object, **kwargs: object) -> object:
            launch_result = original_method(self, *args, **kwargs)
            launch_hashes.extend(filter(None, [code_of(self, launch_result, kwargs)]))
            return launch_result

        return patch.object(owner, method, launch)

    triton_module = sys.modules.get("triton.runtime.jit")
    cuda_module = sys.modules.get("rooflab.kernels._cuda")  # present only where a kernel has imported it: needs CuPy
    with ExitStack() as exit_stack:
        if triton_module is not None and not interpreting():
            exit_stack.enter_context(noting(triton_module.JITFunction, "run", _of_triton))
        if cuda_module is not None:
            exit_stack.enter_context(noting(cuda_module.CudaKernel, "__call__", _of_cuda))
        yield launch_hashes


def _of_triton(
    function: object, kernel: CompiledKernel | None, options: Mapping[str, object]
) -> tuple[str, str] | None:
    if kernel is None or options.get("warmup"):  # it was only compiled
        return None
    return str(kernel.metadata.name), code_hash(kernel.asm["cubin"])


def _of_cuda(kernel: CudaKernel, result: None, options: Mapping[str, object]) -> tuple[str, str]:
    from rooflab.kernels._cuda import architecture, cubin_file

    code_file = cubin_file(kernel.source, arch=architecture(), options=kernel.options)  # already compiled and cached
    return kernel.name, code_hash(code_file.read_bytes())

"""Detects and names the ways in which a wrong kernel looks right, or a slow kernel looks fast.

Kernels do all of this, on purpose or not (Ouyang et al., KernelBench, 2025; reports in the public kernel contests of
2025 and 2026): they keep answers between calls, finish their work after the call, or return tensors that are computed
when somebody reads them. Code in one process can always deceive other code in it; only known ways are detected.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch.autograd import profiler_legacy

from rooflab.bench.check.poison import SENTINEL_BYTE, bits, same_bits
from rooflab.bench.timing.trace import DEVICE_EVENTS, NotRecorded, recorded
from rooflab.reference.spec import OpSpec, Outputs

SETTLE_S, GLANCE_S = 0.25, 0.02
"""How long to watch an output for late writes: with other Python threads, and without."""
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
"""Functions that are not counted as work: a call with `out` does not allocate its outputs."""
_PERSISTING_L2 = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the CUDA driver API."""


def lazy(output: torch.Tensor) -> str | None:
    """Why `output` is not a plain tensor that already holds its values; None if it is."""
    if type(output) not in (torch.Tensor, torch.nn.Parameter):
        return f"a lazy tensor: a {type(output).__name__}, whose values may be computed when they are read"
    if output.layout != torch.strided or torch._is_functional_tensor(output):
        return f"a lazy tensor: of layout {output.layout}, expected values in plain memory"
    return None


def aliases(output: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether `output` shares memory with `buffer`, even as another object."""
    if not output.numel() or output.device != buffer.device:
        return False
    storage = buffer.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride(), strict=True))
    begin, end = output.data_ptr(), output.data_ptr() + (last + 1) * output.element_size()
    return begin < storage.data_ptr() + storage.nbytes() and storage.data_ptr() < end


def still_running(fn: Callable[..., Any]) -> frozenset[int]:
    """Other threads that run code of the file of `fn`; idle workers of a pool do not."""
    frames = sys._current_frames()
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if len(frames) == 1 or code is None:
        return frozenset()
    own = threading.get_ident()
    return frozenset(ident for ident, frame in frames.items() if ident != own and _is_inside(frame, code.co_filename))


def _is_inside(frame: types.FrameType | None, file: str) -> bool:
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


def changes_later(
    outputs: Outputs, read: Outputs, fn: Callable[..., Any], threads: frozenset[int] | None = None
) -> str | None:
    """A fault if `outputs` change from the values `read` while `threads` run; with None, within a fixed time."""
    ends = time.monotonic() + (SETTLE_S if len(sys._current_frames()) > 1 else GLANCE_S)
    while True:
        busy = threads is None or bool(threads & still_running(fn))
        if any(not same_bits(now, was) for now, was in zip(outputs, read, strict=True)):
            return "a thread that finishes later: the output changed after the call had returned"
        if not busy or time.monotonic() > ends:
            return None
        time.sleep(0.002)


def kept_answer(read: Outputs, earlier: Sequence[tuple[str, Outputs]]) -> str | None:
    """A fault if `read` equals the outputs of one of the `earlier` calls bit for bit; the fault names its label."""
    for age, (label, answer) in enumerate(reversed(earlier)):
        pairs = list(zip(read, answer, strict=True))
        if pairs and all(one.shape == other.shape and same_bits(one, other) for one, other in pairs):
            return f"a cached answer: the output of {'an earlier call' if age else 'the call before'}, on {label}"
    return None


def never_written(read: Outputs) -> bool:
    """Whether outputs hold only poison: NaN, the sentinel, or torch's value for uninitialised integers."""
    return bool(read) and all(output.numel() and _is_poison(output) for output in read)


def _is_poison(output: torch.Tensor) -> bool:
    if output.dtype.is_floating_point:
        return bool(output.isnan().all())
    if output.dtype in (torch.bool, torch.uint8):
        return False  # poison is an ordinary value there
    fresh = bool((output == torch.iinfo(output.dtype).max).all())
    return fresh or bool((bits(output) == SENTINEL_BYTE).all())


@contextmanager
def work_noted(names: set[str], device: torch.device, profiled: bool = False) -> Iterator[None]:
    """Adds to `names` the operations called on a CPU, or with `profiled` a CUDA device's kernels.

    On a CPU autograd's profiler of old sees them, in a few milliseconds: it changes nothing of what runs.  A function
    mode would keep `torch.compile` from its work.  Triton's interpreter is visible by the calls that move its data.
    The newer profiler, for a device's kernels, takes 0.1 s.
    """
    if not profiled:
        noting: Any = profiler_legacy.profile() if device.type == "cpu" else nullcontext()  # type: ignore[no-untyped-call]
        with noting as seen:
            yield
        if seen is not None:
            called = (event.name for event in seen.function_events if event.cpu_parent is None)
            names.update(name.removeprefix("aten::") for name in called)
        return
    with ExitStack() as stack:
        trace = None
        with suppress(NotRecorded):  # another profiler runs, so this kernel's work is unknown
            trace = stack.enter_context(recorded("cuda"))
        yield
    if trace is not None:
        names.update(str(event["name"]) for event in trace.events if event.get("cat") in DEVICE_EVENTS)


def kept_names(spec: OpSpec, inputs: Mapping[str, Any]) -> frozenset[str]:
    """Names of the weights: a kernel may keep what it computes from a weight while it is the same tensor."""
    beside = getattr(spec, "prepared_with", ())  # in an A/B, the spec of an older tree lacks this field
    return frozenset(name for name in inputs if name in (spec.prepared, *beside, "weight"))


def alike(inputs: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether both have the same shapes and scalars, so that the values of one fit into the memory of the other."""
    return all(
        isinstance(value, torch.Tensor) and value.shape == others[name].shape
        if isinstance(others[name], torch.Tensor)
        else value == others[name]
        for name, value in inputs.items()
    )


def persisting_l2_bytes(driver: Any = None) -> int:
    """Bytes of L2 that this thread's CUDA context reserves for persisting data, which survive a flush."""
    size = ctypes.c_size_t(0)
    failed = (driver or ctypes.CDLL("libcuda.so.1")).cuCtxGetLimit(ctypes.byref(size), _PERSISTING_L2)
    return 0 if failed else int(size.value)


def give_back_l2(before: int = 0, driver: Any = None) -> None:
    """Clears the data in the reserved part of L2, and reserves as many bytes as before."""
    driver = driver or ctypes.CDLL("libcuda.so.1")
    driver.cuCtxResetPersistingL2Cache()
    driver.cuCtxSetLimit(_PERSISTING_L2, ctypes.c_size_t(before))

"""Ways in which a kernel passes for right, or for fast, without being so, each by its name.

Kernels have been seen to do all of this, on purpose or not (Ouyang et al., KernelBench, 2025; the reports in the public
kernel contests of 2025 and 2026): keep answers between calls, end their work after the call, return tensors that are
computed when they are looked at. Code in one process is never safe from other code in it; what is here is what shows.
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
from torch.overrides import TorchFunctionMode

from rooflab.bench.check.poison import SENTINEL_BYTE, bits
from rooflab.bench.timing.trace import DEVICE_EVENTS, NotRecorded, recorded
from rooflab.reference.spec import OpSpec, Outputs

SETTLE_S, GLANCE_S = 0.25, 0.02
"""How long an output is watched for whether something still writes to it, with other threads of Python and without."""
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
"""Not work: a call that is given its outputs does not allocate them."""
_PERSISTING_L2 = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the CUDA driver API."""


def lazy(output: torch.Tensor) -> str | None:
    """Why `output` is no plain tensor that holds its values now, or None."""
    if type(output) not in (torch.Tensor, torch.nn.Parameter):
        return f"a lazy tensor: a {type(output).__name__}, whose values may be computed when they are read"
    if output.layout != torch.strided or torch._is_functional_tensor(output):
        return f"a lazy tensor: of layout {output.layout}, expected values in plain memory"
    return None


def aliases(output: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether an output lies in the memory behind `buffer`, whatever object holds it."""
    if not output.numel() or output.device != buffer.device:
        return False
    storage = buffer.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride(), strict=True))
    begin, end = output.data_ptr(), output.data_ptr() + (last + 1) * output.element_size()
    return begin < storage.data_ptr() + storage.nbytes() and storage.data_ptr() < end


def still_running(fn: Callable[..., Any]) -> frozenset[int]:
    """Other threads with code of the file of `fn` on their stack; the idle workers of a pool have no such code."""
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
    """Whether `outputs` become other than they were `read` while `threads` run; by default, while anything may."""
    ends = time.monotonic() + (SETTLE_S if len(sys._current_frames()) > 1 else GLANCE_S)
    while True:
        busy = threads is None or bool(threads & still_running(fn))
        if any(not torch.equal(bits(now), bits(was)) for now, was in zip(outputs, read, strict=True)):
            return "a thread that finishes later: the output changed after the call had returned"
        if not busy or time.monotonic() > ends:
            return None
        time.sleep(0.002)


def kept_answer(read: Outputs, earlier: Sequence[tuple[str, Outputs]]) -> str | None:
    """Which of the `earlier` calls' outputs, by label, came back bit for bit."""
    for age, (label, answer) in enumerate(reversed(earlier)):
        pairs = list(zip(read, answer, strict=True))
        if pairs and all(one.shape == other.shape and torch.equal(bits(one), bits(other)) for one, other in pairs):
            return f"a cached answer: the output of {'an earlier call' if age else 'the call before'}, on {label}"
    return None


def never_written(read: Outputs) -> bool:
    """Whether outputs are poison all over: NaN, the sentinel, or what torch puts into fresh integers."""
    return bool(read) and all(output.numel() and _is_poison(output) for output in read)


def _is_poison(output: torch.Tensor) -> bool:
    if output.dtype.is_floating_point:
        return bool(output.isnan().all())
    if output.dtype in (torch.bool, torch.uint8):
        return False  # poison is an ordinary value there
    fresh = bool((output == torch.iinfo(output.dtype).max).all())
    return fresh or bool((bits(output) == SENTINEL_BYTE).all())


class _Called(TorchFunctionMode):
    """Notes the names of the functions of torch that are called, which run as they would."""

    def __init__(self, names: set[str]):
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@contextmanager
def work_noted(names: set[str], device: torch.device, profiled: bool = False) -> Iterator[None]:
    """Inside it `names` grows by torch's functions on a CPU (2 us each), with `profiled` by a CUDA device's kernels.

    Triton's interpreter shows itself by the calls that move its data. Torch's profiler takes 0.1 s.
    """
    if not profiled:
        with _Called(names) if device.type == "cpu" else nullcontext():
            yield
        return
    with ExitStack() as stack:
        trace = None
        with suppress(NotRecorded):  # another profiler runs: nothing can be said of this kernel's work
            trace = stack.enter_context(recorded("cuda"))
        yield
    if trace is not None:
        names.update(str(event["name"]) for event in trace.events if event.get("cat") in DEVICE_EVENTS)


def kept_names(spec: OpSpec, inputs: Mapping[str, Any]) -> frozenset[str]:
    """The weights: a kernel may keep what it made of one for as long as it is the same tensor."""
    beside = getattr(spec, "prepared_with", ())  # an older tree's definition, in an A/B, has none
    return frozenset(name for name in inputs if name in (spec.prepared, *beside, "weight"))


def alike(inputs: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether both have the same shapes and the same scalars, so that one's values can stand in the other's memory."""
    return all(
        isinstance(value, torch.Tensor) and value.shape == others[name].shape
        if isinstance(others[name], torch.Tensor)
        else value == others[name]
        for name, value in inputs.items()
    )


def rewrite(inputs: Mapping[str, Any], fresh: Mapping[str, Any], keep: frozenset[str]) -> None:
    """Gives tensors of `inputs` the values of `fresh`, with no new version, as kernels write."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and name not in keep:
            value.data.copy_(fresh[name])


def persisting_l2_bytes(driver: Any = None) -> int:
    """Bytes of L2 that this thread's CUDA context sets aside for data that outlives a flush."""
    size = ctypes.c_size_t(0)
    failed = (driver or ctypes.CDLL("libcuda.so.1")).cuCtxGetLimit(ctypes.byref(size), _PERSISTING_L2)
    return 0 if failed else int(size.value)


def give_back_l2(driver: Any = None) -> None:
    """Ends that, and clears what lies there."""
    driver = driver or ctypes.CDLL("libcuda.so.1")
    driver.cuCtxResetPersistingL2Cache()
    driver.cuCtxSetLimit(_PERSISTING_L2, ctypes.c_size_t(0))

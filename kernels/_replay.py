"""Records the C++ launches of a function on a CPU. A replay repeats all launches with one call of C++, like a CUDA
graph.

A decode step of SmolLM2-135M has 273 launches, and the Python code around a launch takes 16 us on an AMD EPYC. A
recording holds addresses, so every replay reads and writes the same tensors. Memory for the function's own tensors is
planned once.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.kernels import _native
from rooflab.kernels._native import NativeFunction, built

SOURCE = Path(__file__).with_suffix(".cpp")
ALIGNMENT = 64
"""The bytes of a cache line.  Each planned tensor begins at a multiple of them."""
ALLOCATING_OPS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


class RecordError(ValueError):
    """Says that a function cannot be recorded.  The message names the kernel and the torch op that it calls."""


@dataclass(frozen=True)
class RecordedLaunch:
    """Holds one call of a C++ function."""

    kernel: str
    """The kernel that called, such as `gemm/native`."""
    function: NativeFunction
    arguments: tuple[Any, ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the calls of compiled C++ functions while a Python function runs. Also collects the tensors that the
    function allocates. Raises `RecordError` on other torch ops, except views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[Tensor] = []
        self.launches: list[RecordedLaunch] = []

    def __enter__(self) -> _Recorder:
        _native.note_launch = lambda *launch: self.launches.append(RecordedLaunch(_kernel_of_call(), *launch))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _native.note_launch = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op_schema = func._schema
        if op_schema.name in ALLOCATING_OPS:
            self.buffers.append(result)
        elif not all(value.alias_info and not value.alias_info.is_write for value in op_schema.returns):
            raise RecordError(f"{_kernel_of_call()} calls {op_schema.name.replace('aten::', 'torch.')}")
        return result


def _kernel_of_call() -> str:
    """Returns the name of the kernel that runs now, such as `gemm/library`.  The outermost kernel file on the call
    stack gives the name."""
    kernel, caller_frame = "the function", sys._getframe(1)
    while caller_frame is not None:
        code_path = Path(caller_frame.f_code.co_filename)
        if code_path.parent.parent == SOURCE.parent:
            kernel = f"{code_path.parent.name}/{code_path.stem}"
        caller_frame = caller_frame.f_back  # type: ignore[assignment]
    return kernel


@dataclass(frozen=True)
class Buffer:
    """Describes memory that a recorded function allocated."""

    address: int
    nbytes: int
    first: int
    """The index of the first launch that uses the memory."""
    last: int
    """The index of the last launch that uses the memory."""


def planned(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """Returns the offset of each buffer in one shared block of memory, and the size of the block in bytes.

    Two buffers may share memory if the last use of one comes before the first use of the other. Buffers are placed in
    the order of first use, at the lowest free offset."""
    buffer_offsets = [0] * len(buffers)
    live_buffers: list[tuple[int, int, int]] = []
    block_bytes = 0
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index].first):
        next_buffer, buffer_offset = buffers[index], 0
        live_buffers = sorted(live_buffer for live_buffer in live_buffers if live_buffer[2] >= next_buffer.first)
        for start_offset, end_offset, _ in live_buffers:
            if start_offset - buffer_offset >= next_buffer.nbytes:
                break
            buffer_offset = max(buffer_offset, end_offset)
        end_offset = buffer_offset + -(-next_buffer.nbytes // ALIGNMENT) * ALIGNMENT
        live_buffers.append((buffer_offset, end_offset, next_buffer.last))
        buffer_offsets[index], block_bytes = buffer_offset, max(block_bytes, end_offset)
    return buffer_offsets, block_bytes


class Recording:
    """Holds the launches of a recorded function, and repeats them on the same tensors."""

    def __init__(self, launches: Sequence[RecordedLaunch], moved: Callable[[int], int], memory: Tensor, out: Tensor):
        """Prepares recorded kernel launches for a replay.  `moved` maps a recorded address to its address in the
        replay. The replay keeps intermediate tensors in `memory`, and the result in `out`."""
        self.kernels = [launch.kernel for launch in launches]
        """The kernel of each launch, such as `gemm/native`."""
        self.memory = memory
        """The memory of all tensors between the launches, as bytes."""
        self._kept = launches, out  # the lists below hold addresses only
        self._slots = [launch.function.slots(launch.arguments, moved) for launch in launches]
        pointer_array = ctypes.c_void_p * len(launches)
        self._entries = pointer_array(*(launch.function.entry for launch in launches))
        self._addresses = pointer_array(*map(ctypes.addressof, self._slots))
        self._run = built(SOURCE, "pppn").run

    def __call__(self, seconds: ctypes.Array[ctypes.c_double] | None = None) -> str | None:
        """Runs the launches in order, and writes the seconds of each launch to `seconds`. If a C++ function refuses its
        arguments, stops and returns the name of its kernel.  Otherwise returns None."""
        failed_launch = self._run(self._entries, self._addresses, seconds, len(self.kernels))
        return None if failed_launch < 0 else self.kernels[failed_launch]

    def timed(self, note: Callable[[str, float], None]) -> str | None:
        """Runs the launches as `__call__` does, and measures the time of each launch.  Then calls `note` with the
        kernel and the seconds of each launch."""
        seconds = (ctypes.c_double * len(self.kernels))()
        failed_kernel = self(seconds)
        for kernel, kernel_seconds in zip(self.kernels, seconds, strict=True):
            note(kernel, kernel_seconds)
        return failed_kernel


def record(function: Callable[[], Tensor], out: Tensor) -> Recording:
    """Calls `function` once and records its launches. A replay writes the function's result to `out`.

    The function may launch C++ kernels, allocate tensors and take views. Raises `RecordError` on other torch ops, or if
    the result is not a new tensor with the layout of `out`."""
    with _Recorder() as recorder:
        result = function()
    # `recorder` keeps all buffers alive, so no two of them have the same address.
    storages = sorted((tensor.untyped_storage() for tensor in recorder.buffers), key=lambda storage: storage.data_ptr())
    start_addresses = [storage.data_ptr() for storage in storages]

    def buffer_at(address: int) -> int | None:
        """Returns the index of the allocation that holds `address`, or None."""
        index = bisect.bisect(start_addresses, address) - 1
        return index if index >= 0 and address < start_addresses[index] + storages[index].nbytes() else None

    launches_by_buffer: dict[int, list[int]] = {}
    for launch_index, launch in enumerate(recorder.launches):
        for address in launch.function.addresses(launch.arguments):
            if (index := buffer_at(address)) is not None:
                launches_by_buffer.setdefault(index, []).append(launch_index)
    result_buffer = buffer_at(result.data_ptr())
    if result_buffer is None or (result.shape, result.stride(), result.dtype) != (out.shape, out.stride(), out.dtype):
        raise RecordError(f"the result {tuple(result.shape)} is no new tensor in the layout {tuple(out.shape)}")
    new_addresses = {result_buffer: out.data_ptr() - (result.data_ptr() - start_addresses[result_buffer])}
    planned_buffers = {
        index: Buffer(start_addresses[index], storages[index].nbytes(), launch_indices[0], launch_indices[-1])
        for index, launch_indices in launches_by_buffer.items()
        if index != result_buffer
    }
    offsets, planned_bytes = planned([*planned_buffers.values()])
    memory = torch.empty(planned_bytes + ALIGNMENT, dtype=torch.uint8)
    aligned_address = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    new_addresses |= {index: aligned_address + offset for index, offset in zip(planned_buffers, offsets, strict=True)}

    def moved(address: int) -> int:
        index = buffer_at(address)
        return address if index is None else new_addresses[index] + address - start_addresses[index]

    return Recording(recorder.launches, moved, memory, out)

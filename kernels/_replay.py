"""Records the C++ launches of a function on a CPU, and repeats them later with one call into C++.

A decode step of SmolLM2-135M is 271 launches.  Through Python each costs about 5 us more than its work, as the launch
of a CUDA kernel does; CUDA graphs are the same remedy there.  A recording holds addresses, so the function must read
and write the same tensors in every call.  Memory for the tensors that the function makes is planned once.
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
from rooflab.kernels._native import Launch, built

SOURCE = Path(__file__).with_suffix(".cpp")
ALIGNMENT = 64
"""Bytes: a line of the cache."""
ALLOCATING = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


class RecordError(ValueError):
    """A function did something that cannot be replayed.  The message names the kernel and the torch op."""


class _Recorder(TorchDispatchMode):
    """Keeps the tensors that a function makes.  Allows views, and refuses every other torch op."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name in ALLOCATING:
            self.buffers.append(result)
        elif not all(value.alias_info and not value.alias_info.is_write for value in schema.returns):
            raise RecordError(f"{_kernel_of_call()} calls {schema.name.replace('aten::', 'torch.')}")
        return result


def _kernel_of_call() -> str:
    """Returns the name of the kernel, such as `gemm/library`, whose launcher is the innermost in this call."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.parent == SOURCE.parent:
            return f"{path.parent.name}/{path.stem}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the function"


@dataclass(frozen=True)
class Buffer:
    """Memory that the function allocated."""

    address: int
    nbytes: int
    first: int
    """The index of the first launch that uses the memory."""
    last: int
    """The index of the last launch that uses the memory."""


def planned(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """Returns the offset of each buffer in one block of memory, and the bytes of the block.

    Two buffers do not overlap if one launch lies between the first and the last use of both.  In the order of their
    first launches, each buffer takes the first gap."""
    offsets = [0] * len(buffers)
    live: list[tuple[int, int, int]] = []
    total = 0
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index].first):
        buffer, offset = buffers[index], 0
        live = sorted(entry for entry in live if entry[2] >= buffer.first)
        for begin, end, _ in live:
            if begin - offset >= buffer.nbytes:
                break
            offset = max(offset, end)
        end = offset + -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        live.append((offset, end, buffer.last))
        offsets[index], total = offset, max(total, end)
    return offsets, total


class Recording:
    """Repeats the launches of a recorded function on the same tensors."""

    def __init__(self, launches: Sequence[Launch], moved: Callable[[int], int], kept: Sequence[Tensor]):
        """Takes the recorded launches, a function from a recorded address to the address that replaces it, and the
        tensors that hold the new addresses."""
        self.kernels = [function.name for function, _ in launches]
        """The kernel of each launch, such as `gemm/native`."""
        self._kept = launches, kept  # the recording holds addresses only
        self._slots = [function.slots(arguments, moved) for function, arguments in launches]
        addresses = ctypes.c_void_p * len(launches)
        self._entries = addresses(*(function.entry for function, _ in launches))
        self._addresses = addresses(*map(ctypes.addressof, self._slots))
        self._run = built(SOURCE, "pppn").run

    def __call__(self, seconds: ctypes.Array[ctypes.c_double] | None = None) -> str | None:
        """Runs all launches in order.  Returns None, or the kernel whose C++ function refused its arguments: then the
        later launches did not run."""
        failed = self._run(self._entries, self._addresses, seconds, len(self.kernels))
        return None if failed < 0 else self.kernels[failed]

    def seconds(self) -> list[float]:
        """Runs all launches, and returns the seconds of each.  A clock is read before and after each launch."""
        times = (ctypes.c_double * len(self.kernels))()
        self(times)
        return list(times)


def record(function: Callable[[], Tensor], out: Tensor) -> Recording:
    """Calls `function` once, and returns a replay that writes the function's result to `out`.

    The function may launch C++ kernels, allocate tensors and take views.  Raises `RecordError` on any other torch op,
    and on a result that the function did not allocate in the layout of `out`."""
    recorder = _Recorder()
    launches = _native.recorded = []
    try:
        with recorder:
            result = function()
    finally:
        _native.recorded = None
    # All buffers are alive, so that no two of them share an address.
    storages = sorted((tensor.untyped_storage() for tensor in recorder.buffers), key=lambda storage: storage.data_ptr())
    starts = [storage.data_ptr() for storage in storages]

    def buffer_at(address: int) -> int | None:
        """Returns the index of the allocation that holds `address`, or None."""
        index = bisect.bisect(starts, address) - 1
        return index if index >= 0 and address < starts[index] + storages[index].nbytes() else None

    uses: dict[int, list[int]] = {}
    for number, (function_called, arguments) in enumerate(launches):
        for address in function_called.addresses(arguments):
            if (index := buffer_at(address)) is not None:
                uses.setdefault(index, []).append(number)
    holder = buffer_at(result.data_ptr())
    if holder is None or (result.shape, result.stride(), result.dtype) != (out.shape, out.stride(), out.dtype):
        raise RecordError(f"the result {tuple(result.shape)} is no new tensor in the layout {tuple(out.shape)}")
    targets = {holder: out.data_ptr() - (result.data_ptr() - starts[holder])}
    planning = {
        index: Buffer(starts[index], storages[index].nbytes(), numbers[0], numbers[-1])
        for index, numbers in uses.items()
        if index != holder
    }
    offsets, total = planned([*planning.values()])
    memory = torch.empty(total + ALIGNMENT, dtype=torch.uint8)
    base = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    targets |= {index: base + offset for index, offset in zip(planning, offsets, strict=True)}

    def moved(address: int) -> int:
        index = buffer_at(address)
        return address if index is None else targets[index] + address - starts[index]

    return Recording(launches, moved, (memory, out))

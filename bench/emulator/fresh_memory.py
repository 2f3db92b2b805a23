"""Knows which elements of the tensors of `torch.empty` nobody has written: no kernel and no function of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.bench.emulator.machine.launch_order import LaunchOrder

Flags = npt.NDArray[np.bool_]
_ATEN = torch.ops.aten
_ALLOCATORS = (
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.empty_permuted,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
)
_FILLERS = (_ATEN.copy_, _ATEN.fill_, _ATEN.zero_)


@dataclass
class _Fresh:
    """Holds a tensor of `torch.empty` that no function of torch has used yet."""

    tensor: torch.Tensor
    """Held so that no other tensor can get the same memory."""
    written: Flags | None = None
    """For each byte of the storage, whether a launch wrote it; None before the first launch that could."""
    launch: int = -1
    """The number of the last launch that could write the tensor."""

    def flags(self) -> Flags:
        """Returns `written`, which begins as all False."""
        if self.written is None:
            self.written = np.zeros(self.tensor.untyped_storage().nbytes(), np.bool_)
        return self.written


class FreshMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records tensors without valid contents, from `torch.empty` and similar functions.  It is a torch dispatch mode.

    A tensor is recorded until another torch function uses it.  A view shares the memory and does not count as a use.
    A fill of a view, or a copy into it, writes the elements of the view alone."""

    supports_higher_order_operators = True  # of torch.library.wrap_triton, whose launches the emulator sees itself

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: dict[int, _Fresh] = {}
        """The tensors by the address of their storage."""
        self.report: Callable[[int, str], None] = lambda launch, text: None
        """A function that gets a launch's number and a sentence: somebody reads elements that nobody wrote."""
        self.order = LaunchOrder()
        """What the launches did that run at the same time as other work may."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        is_watched = self._tensors or self.order.is_open
        if is_watched and func.overloadpacket not in _ALLOCATORS and not _is_view(func) and not _reads_shape(func):
            used = [
                (tensor, "write" if is_written else "read")
                for value, is_written in _arguments(func, args, kwargs)
                for tensor in tensors_in(value)
            ]
            self.order.torch_operator(str(func.overloadpacket), used)
            for tensor in [tensor for tensor, verb in used if verb == "read"]:
                self.check(tensor, f"a tensor of shape {list(tensor.shape)}, which {func.overloadpacket} reads")
            for tensor, _ in used:
                self._fill(tensor) if func.overloadpacket in _FILLERS else self.forget([tensor])
        result = func(*args, **kwargs)
        if isinstance(result, bool | int | float):
            self.order.synchronize([self.order.stream])  # the host has the value
        is_new = func.overloadpacket in _ALLOCATORS and "out" not in kwargs and result.layout == torch.strided
        if is_new and result.device.type == "cpu" and result.untyped_storage().nbytes():
            self._tensors[result.untyped_storage().data_ptr()] = _Fresh(result)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Forgets all tensors and launches."""
        self._tensors.clear()
        self.order.clear()

    def written(self, tensors: Iterable[torch.Tensor], launch: int) -> dict[int, Flags]:
        """Returns the flags of the recorded tensors in `tensors`, by the address of their storage.

        The launch of number `launch` sets a flag for each byte that it writes."""
        flags = dict[int, Flags]()
        for address in map(_address, tensors):
            if fresh := self._tensors.get(address):
                fresh.launch, flags[address] = launch, fresh.flags()
        return flags

    def _fill(self, tensor: torch.Tensor) -> None:
        fresh, item = self._tensors.get(_address(tensor)), tensor.element_size()
        if fresh is None or tensor.numel() * item >= fresh.tensor.untyped_storage().nbytes():
            return self.forget([tensor])
        shape, strides = (*tensor.shape, item), (*(item * stride for stride in tensor.stride()), 1)
        torch.from_numpy(fresh.flags()).as_strided(shape, strides, item * tensor.storage_offset()).fill_(True)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records that `tensors` may have been written."""
        for tensor in tensors:
            self._tensors.pop(_address(tensor), None)

    def check(self, tensor: torch.Tensor, name: str, last_launch: int | None = None) -> None:
        """Reports elements of `tensor` that nobody wrote.  `name` says what tensor it is.

        A tensor that no launch could write is only checked with `last_launch`, which then gets the sentence."""
        fresh = self._tensors.get(_address(tensor))
        if fresh is not None and (fresh.written is not None or last_launch is not None):
            storage_bytes = fresh.tensor.untyped_storage().nbytes()
            text = _unwritten(tensor, np.zeros(storage_bytes, np.bool_) if fresh.written is None else fresh.written)
            if text:
                self.report(
                    fresh.launch if last_launch is None or fresh.launch >= 0 else last_launch, f"{name}: {text}"
                )


def _unwritten(tensor: torch.Tensor, written: Flags) -> str:
    """Says how many elements of a tensor nobody wrote, and which is the first. Returns an empty text if all were
    written."""
    size = tensor.element_size()
    if not tensor.numel():
        return ""
    flags: Flags = np.logical_and.reduce(written[: len(written) // size * size].reshape(-1, size), axis=1)
    flags = flags[tensor.storage_offset() :]
    is_unwritten = ~np.lib.stride_tricks.as_strided(flags, tuple(tensor.shape), tensor.stride(), writeable=False)
    count = int(np.count_nonzero(is_unwritten))
    if not count:
        return ""
    first_index = [int(index) for index in np.unravel_index(int(is_unwritten.argmax()), is_unwritten.shape)]
    return (
        f"nobody wrote {count} of its {tensor.numel()} elements, the first at {first_index}; torch.empty allocated it"
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns all tensors in `value`: in lists, tuples, mappings, and as the `base` of tensor descriptors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [tensor for item in value for tensor in tensors_in(item)]
    base_tensor = getattr(value, "base", None)
    return [base_tensor] if isinstance(base_tensor, torch.Tensor) else []


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, bool]]:
    """Returns the arguments of a call of a torch function, and for each whether the function writes it."""
    is_written = {each.name: bool(each.alias_info and each.alias_info.is_write) for each in func._schema.arguments}
    positional = zip(args, is_written.values(), strict=False)
    return [*positional, *((value, is_written[name]) for name, value in kwargs.items())]


def _is_view(func: Any) -> bool:
    """Tells whether a torch function returns the memory of an argument and writes nothing."""
    alias_infos = [return_value.alias_info for return_value in func._schema.returns]
    return bool(alias_infos) and all(alias_info is not None and not alias_info.is_write for alias_info in alias_infos)


def _reads_shape(func: Any) -> bool:
    """Tells whether a torch function reads only the shape and the dtype of its tensor, such as `zeros_like`."""
    name = func.overloadpacket.__name__
    return bool(name.endswith("_like") or name.startswith("new_"))

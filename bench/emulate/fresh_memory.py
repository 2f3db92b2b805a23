"""Which tensors nobody has written since `torch.empty` made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_EMPTY = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.empty_permuted, _ATEN.new_empty,
    _ATEN.new_empty_strided)  # fmt: skip


class FreshMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is held, notes what `torch.empty` and its like make, until any other function of torch takes it.

    Views of it are the same memory, and no use of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: dict[int, torch.Tensor] = {}
        """By address of the storage; held, so that no other tensor can get its memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func.overloadpacket in _EMPTY and not kwargs.keys() & {"out"}:
            if found.device.type == "cpu" and found.layout == torch.strided and found.untyped_storage().nbytes():
                self._tensors[found.untyped_storage().data_ptr()] = found
        elif self._tensors and not _is_view(func):
            self.forget(tensors_in((args, kwargs)))
        return found

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._tensors.clear()

    def among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `tensors` that nobody has written."""
        return [tensor for tensor in tensors if _address(tensor) in self._tensors]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody may write `tensors` now."""
        for tensor in tensors:
            self._tensors.pop(_address(tensor), None)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments: in lists, tuples and mappings, and below tensor descriptors (`base`)."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [tensor for item in value for tensor in tensors_in(item)]
    base = getattr(value, "base", None)
    return [base] if isinstance(base, torch.Tensor) else []


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _is_view(func: Any) -> bool:
    """Whether a function gives its argument's memory and writes nothing."""
    returns = [item.alias_info for item in func._schema.returns]
    return bool(returns) and all(info is not None and not info.is_write for info in returns)

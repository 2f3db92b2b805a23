"""What the torch calls of a naive kernel move, from the operands of each: run on `meta` tensors, nothing is computed.

Each call reads its operands from HBM once and writes its result there, as if it found L2 empty: what torch's kernels do
where tensors are larger than L2, and what the emulator counts of a launch.  An elementwise call asks L2 for an operand
as often as it has results, broadcast ones again for each; a product asks for a tile's rows and columns once a tile, and
that its tiles are of 128 by 128 results is a model, as torch's library chooses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.bench.ptx.machine.counting import SECTOR

PRODUCT_TILE = 128
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
OVERWRITES = ("copy_", "fill_", "zero_")
"""Calls that do not read what they change."""
ELEMENTWISE = ("masked_fill", "masked_fill_", "where", "copy_")
"""Beside those that torch tags so."""
ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided")
aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """One call of torch that moves something, in bytes."""

    name: str
    hbm_read: int
    hbm_write: int
    asked_read: int
    """Of L2."""
    asked_write: int
    modelled: bool
    """Whether `asked_read` is a model's."""


def _logsumexp(x: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """The calls within torch's own `logsumexp` (ATen/native/ReduceOps.cpp), which are kernels each."""
    peaks = aten.amax(x, dim, True)
    squeezed = peaks if keepdim else aten.squeeze(peaks, dim)
    squeezed.masked_fill_(squeezed.abs() == math.inf, 0)
    found: torch.Tensor = aten.sum((x - peaks).exp_(), dim, keepdim)
    return found.log_().add_(squeezed)


COMPOSED: Mapping[Any, Callable[..., torch.Tensor]] = {aten.logsumexp.default: _logsumexp}


class TorchCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists what the calls move while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a call and lists it."""
        kwargs = kwargs or {}
        if func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        result = func(*args, **kwargs)
        call = _call(func, args, kwargs, result)
        if call is not None:
            self.calls.append(call)
        return result


def calls_of(run: Callable[[], object]) -> list[Call]:
    """The calls of torch in `run` that move something, in order."""
    seen = TorchCalls()
    with seen:
        run()
    return seen.calls


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Call | None:
    """None of a view or an allocation."""
    name = func._schema.name.removeprefix("aten::")
    changed, given = _operands(func, args, kwargs)
    made = [item for item in (result if isinstance(result, (tuple, list)) else [result]) if torch.is_tensor(item)]
    results = changed or [item for item in made if not any(_shared(item, other) for other in given)]
    if not results or name in ALLOCATES:
        return None
    read = given + ([] if name in OVERWRITES else changed)
    size = max(item.numel() for item in results)
    if modelled := name in PRODUCTS:
        (*_, rows, columns), repeats = results[0].shape, math.prod(results[0].shape[:-2])
        across, down = math.ceil(columns / PRODUCT_TILE), math.ceil(rows / PRODUCT_TILE)
        a, b = given[-2:]
        inner = a.shape[-1]
        asked = repeats * inner * (rows * across * a.itemsize + columns * down * b.itemsize)
        asked += sum(_bytes(item) for item in given[:-2])
    else:
        pointwise = torch.Tag.pointwise in func.tags or name in ELEMENTWISE
        asked = sum(item.itemsize * (max(item.numel(), size) if pointwise else item.numel()) for item in read)
    return Call(
        name=name,
        hbm_read=sum(_held(item) for item in read),
        hbm_write=sum(_held(item) for item in results),
        asked_read=asked,
        asked_write=sum(_bytes(item) for item in results),
        modelled=modelled,
    )


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that the call changes, and those that it only reads; a scalar in a tensor is none."""
    changed: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    names = [argument.name for argument in func._schema.arguments]
    for argument, value in [*zip(names, args, strict=False), *kwargs.items()]:
        alias = next(item.alias_info for item in func._schema.arguments if item.name == argument)
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if torch.is_tensor(item) and item.numel() > (item.dim() == 0):
                (changed if alias is not None and alias.is_write else read).append(item)
    return changed, read


def _shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.itemsize


def _held(x: torch.Tensor) -> int:
    """Bytes of the elements that differ in their place, in whole sectors."""
    own = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.itemsize
    return -(-own // SECTOR) * SECTOR

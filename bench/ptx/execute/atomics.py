"""`atom` and `red` (PTX ISA 8.7, sections 9.7.13.5 and 6): lane by lane, in the lanes' order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine import access
from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.numbers import half
from rooflab.bench.ptx.text.kinds import dtype_of

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def atomic(
    c: Context,
    space: str,
    addresses: Any,
    operation: str,
    kind: str,
    operands: tuple[Any, ...],
    guard: Any,
    order: str,
    instruction: int,
) -> Any:
    """The values from before, for each lane that the guard lets through; memory holds what the operation leaves."""
    dtype = np.dtype(dtype_of(kind))
    lanes = np.arange(c.size) if guard is None else np.flatnonzero(np.broadcast_to(guard, c.size))
    old = np.zeros(c.size, dtype)
    if not len(lanes):
        return old
    where = np.full(c.size, addresses) if isinstance(addresses, np.generic) else addresses
    given = [np.full(c.size, value) if isinstance(value, np.generic) else value for value in operands]
    run = c.group.run
    observer, run.observer = run.observer, None
    changes, so_far = False, run.changes
    try:
        for turn in _turns(where[lanes]):
            chosen = lanes[turn]
            mask = np.zeros(c.size, np.bool_)
            mask[chosen] = True
            (raw,) = access.load(c, space, where, mask, dtype.itemsize, 1, instruction)
            before = raw[chosen].view(dtype)
            after = _combined(operation, kind, before, [value[chosen] for value in given])
            left = np.zeros(c.size, _UNSIGNED[dtype.itemsize])
            left[chosen] = np.ascontiguousarray(after).view(left.dtype)
            changes = changes or bool((left[chosen] != raw[chosen]).any())
            access.store(c, space, where, (left,), mask, dtype.itemsize, instruction)
            old[chosen] = before
    finally:
        run.observer = observer
    run.atomic(c, space, where[lanes], lanes, dtype.itemsize, order, instruction)
    if not changes:
        run.changes = so_far
        c.polls(instruction, where[lanes])
    return old


def _turns(addresses: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """Lanes in lots in which no two have the same address, each address's lanes in their order."""
    order = np.argsort(addresses, kind="stable")
    sorted_ = addresses[order]
    first = np.r_[True, sorted_[1:] != sorted_[:-1]]
    starts = np.flatnonzero(first)
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    return [np.sort(order[rank == turn]) for turn in range(int(rank.max()) + 1)]


def _combined(operation: str, kind: str, old: Any, values: list[Any]) -> Any:
    new = values[0]
    if kind.startswith(("f16", "bf16")):
        base = kind.removesuffix("x2")
        functions: dict[str, Any] = {"add": half.add, "min": half.fmin, "max": half.fmax}
        return functions[operation](old, new, base)
    if operation == "cas":
        return np.where(old == new, values[1], old)
    if operation == "inc":
        return np.where(old >= new, np.zeros_like(old), old + 1)
    if operation == "dec":
        return np.where((old == 0) | (old > new), new, old - 1)
    simple: dict[str, Any] = {
        "add": np.add,
        "min": np.fmin if old.dtype.kind == "f" else np.minimum,
        "max": np.fmax if old.dtype.kind == "f" else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    return new if operation == "exch" else simple[operation](old, new)

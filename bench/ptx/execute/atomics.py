"""`atom` and `red` (PTX ISA 8.7, sections 9.7.13.5 and 6): lane by lane, in the lanes' order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine import access
from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import SHARED_WINDOW
from rooflab.bench.ptx.numbers import half
from rooflab.bench.ptx.numbers.rounding import flush
from rooflab.bench.ptx.text.kinds import dtype_of

Bools = npt.NDArray[np.bool_]
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
    given = [value[lanes] for value in given]
    run, mask = c.group.run, np.zeros(c.size, np.bool_)
    mask[lanes] = True
    observer, run.observer = run.observer, None
    so_far = run.changes
    try:
        (raw,) = access.load(c, space, where, mask, dtype.itemsize, 1, instruction)
        before = raw[lanes].view(dtype)
        places = _places(c, space, where, lanes, instruction)
        flushed = _flushed(operation, kind, space, where[lanes])
        old[lanes], after = _one_by_one(operation, kind, places, before, given, flushed)
        changes = after.tobytes() != before.tobytes()
        left = np.zeros(c.size, _UNSIGNED[dtype.itemsize])
        left[lanes] = after.view(left.dtype)
        access.store(c, space, where, (left,), mask, dtype.itemsize, instruction)
    finally:
        run.observer = observer
    run.atomic(c, space, where[lanes], lanes, dtype.itemsize, order, instruction)
    if not changes:
        run.changes = so_far
        c.polls(instruction, where[lanes])
    return old


def _places(c: Context, space: str, where: Any, lanes: npt.NDArray[np.int64], instruction: int) -> Any:
    """A number for each lane's place in memory: the same shared address is another place in another CTA."""
    addresses = where[lanes].astype(np.uint64)
    windows = addresses >> np.uint64(60)
    if space == "generic" and ((windows != 0) & (windows != SHARED_WINDOW >> 60)).any():
        raise Fault("an atomic operation on memory that is neither global nor shared", instruction)
    if c.slot is not None or space == "global":
        return addresses
    shared = (windows != 0) | (space == "shared")
    return addresses + shared * (c.slots[lanes].astype(np.uint64) << np.uint64(32))


def _flushed(operation: str, kind: str, space: str, addresses: Any) -> Bools | None:
    """Where subnormals become zeros: `add.f32` makes them so in global memory, and not in shared; None for nowhere."""
    if operation != "add" or kind != "f32" or space == "shared":
        return None
    found: Bools = addresses >> np.uint64(60) == 0
    return found


def _one_by_one(
    operation: str, kind: str, places: Any, before: Any, values: list[Any], flushed: Bools | None
) -> tuple[Any, Any]:
    """What each lane finds, and what is left at its place after the last lane.

    Lanes of one place go in their order: place by place where these are few, else in turns, in which no two lanes have
    the same.
    """
    order = np.argsort(places, kind="stable")
    sorted_ = places[order]
    first = np.r_[True, sorted_[1:] != sorted_[:-1]]
    if first.all():
        return before, np.ascontiguousarray(_combined(operation, kind, before, values, flushed))
    starts = np.flatnonzero(first)
    counts = np.diff(np.r_[starts, len(order)])
    found, left = before.copy(), before.copy()
    function = None if kind.startswith(("f16", "bf16")) else _function(operation, before.dtype)
    if function is not None and len(starts) < counts.max():
        for own in np.split(order, starts[1:]):
            steps = function.accumulate(np.r_[before[own[:1]], values[0][own]], dtype=before.dtype)
            if flushed is not None and flushed[own[0]]:
                steps = _flushed_sums(steps, values[0][own])
            found[own], left[own] = steps[:-1], steps[-1]
        return found, left
    rank = np.arange(len(order)) - np.repeat(starts, counts)
    group = np.repeat(np.arange(len(starts)), counts)
    memory = before[order[starts]]
    by_rank = np.argsort(rank, kind="stable")
    for turn in np.split(by_rank, np.cumsum(np.bincount(rank))[:-1]):
        lanes, at = order[turn], group[turn]
        found[lanes] = memory[at]
        memory[at] = _combined(operation, kind, memory[at], [value[lanes] for value in values], _of(flushed, lanes))
    left[order] = memory[group]
    return found, left


def _of(flushed: Bools | None, lanes: Any) -> Bools | None:
    return None if flushed is None else flushed[lanes]


def _flushed_sums(steps: Any, values: Any) -> Any:
    """Sums so far, made anew where a subnormal is among them or the values: the zero in its place changes the rest."""
    if (flush(steps) == steps).all() and (flush(values) == values).all():
        return steps
    found = steps.copy()
    for place, value in enumerate(flush(values)):
        found[place + 1 : place + 2] = flush(flush(found[place : place + 1]) + value)
    return found


def _function(operation: str, dtype: np.dtype[Any]) -> Any:
    """The operations that are one function of NumPy; None for the others."""
    simple: dict[str, Any] = {
        "add": np.add,
        "min": np.fmin if dtype.kind == "f" else np.minimum,
        "max": np.fmax if dtype.kind == "f" else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    return simple.get(operation)


def _combined(operation: str, kind: str, old: Any, values: list[Any], flushed: Bools | None) -> Any:
    new = values[0]
    if flushed is not None:
        total = flush(flush(old) + flush(new))
        return total if flushed.all() else np.where(flushed, total, old + new)
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
    return new if operation == "exch" else _function(operation, old.dtype)(old, new)

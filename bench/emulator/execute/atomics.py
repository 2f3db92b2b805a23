"""Runs `atom` and `red` (PTX ISA 8.7, sections 9.7.13.5 and 6) one lane after another, in the lanes' order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine import access
from rooflab.bench.emulator.machine.access import shared_offsets
from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.memory import SHARED_WINDOW
from rooflab.bench.emulator.machine.run import Fault
from rooflab.bench.emulator.numbers import half
from rooflab.bench.emulator.numbers.bits import COMBINE, flush
from rooflab.bench.emulator.text.kinds import dtype_of

Bools = npt.NDArray[np.bool_]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def atomic(
    c: LaneContext,
    space: str,
    addresses: Any,
    operation: str,
    kind: str,
    operands: tuple[Any, ...],
    guard: Any,
    order: str,
    instruction: int,
) -> Any:
    """Does the atomic operation for each lane whose guard is true; returns the old values."""
    dtype = np.dtype(dtype_of(kind))
    lanes = c.lanes_under(guard)
    old = np.zeros(c.size, dtype)
    if not len(lanes):
        return old
    where = c.vector(addresses)
    values = [c.vector(value)[lanes] for value in operands]
    run, mask = c.group.run, np.zeros(c.size, np.bool_)
    mask[lanes] = True
    observer, run.observer = run.observer, None
    so_far = run.changes
    try:
        (raw,) = access.load(c, space, where, mask, dtype.itemsize, 1, instruction)
        before = raw[lanes].view(dtype)
        places = _places(c, space, where, lanes, instruction)
        flushed = _flushed(operation, kind, space, where[lanes])
        old[lanes], after = _one_by_one(operation, kind, places, before, values, flushed)
        changes = after.tobytes() != before.tobytes()
        final = np.zeros(c.size, _UNSIGNED[dtype.itemsize])
        final[lanes] = after.view(final.dtype)
        access.store(c, space, where, (final,), mask, dtype.itemsize, instruction)
    finally:
        run.observer = observer
    _observe(c, space, where[lanes], lanes, dtype.itemsize, order, instruction)
    if not changes:
        run.changes = so_far
        c.polls(instruction, where[lanes])
    return old


def _observe(c: LaneContext, space: str, addresses: Any, lanes: Any, size: int, order: str, instruction: int) -> None:
    """Tells the observer about the lanes' atomic operation."""
    observer = c.group.run.observer
    if observer is None:
        return
    if space == "generic":
        windows = addresses >> np.uint64(60)
        for kind, where in ((SHARED_WINDOW >> 60, "shared"), (0, "global")):
            inside = windows == kind
            if inside.any():
                _observe(c, where, addresses[inside], lanes[inside], size, order, instruction)
    elif space == "shared":
        near = addresses.astype(np.uint32)  # without the window of a generic address
        offsets = np.asarray(shared_offsets(c, near, size, lanes, instruction)).astype(np.int64)
        observer.shared_atomic(c, lanes, offsets, size, instruction)
    else:
        observer.global_atomic(c, lanes, addresses, size, order, instruction)


def _places(c: LaneContext, space: str, where: Any, lanes: npt.NDArray[np.int64], instruction: int) -> Any:
    """A number for each lane's memory location: the same shared address is another location in each CTA."""
    addresses = where[lanes].astype(np.uint64)
    windows = addresses >> np.uint64(60)
    if space == "generic" and ((windows != 0) & (windows != SHARED_WINDOW >> 60)).any():
        raise Fault("an atomic operation on memory that is neither global nor shared", instruction)
    if c.slot is not None or space == "global":
        return addresses
    shared = (windows != 0) | (space == "shared")
    return addresses + shared * (c.slots[lanes].astype(np.uint64) << np.uint64(32))


def _flushed(operation: str, kind: str, space: str, addresses: Any) -> Bools | None:
    """Lanes whose subnormals become zeros; None means no lanes.  `add.f32` flushes in global memory, not in shared."""
    if operation != "add" or kind != "f32" or space == "shared":
        return None
    in_global: Bools = addresses >> np.uint64(60) == 0
    return in_global


def _one_by_one(
    operation: str, kind: str, places: Any, before: Any, values: list[Any], flushed: Bools | None
) -> tuple[Any, Any]:
    """The value that each lane reads, and the final value at the lane's memory location.

    Lanes with the same location run in order.  If there are few locations, the code handles one location after another.
    Otherwise it handles the lanes in turns, and the lanes of one turn all have different locations.
    """
    order = np.argsort(places, kind="stable")
    sorted_ = places[order]
    first = np.r_[True, sorted_[1:] != sorted_[:-1]]
    if first.all():
        return before, np.ascontiguousarray(_combined(operation, kind, before, values, flushed))
    starts = np.flatnonzero(first)
    counts = np.diff(np.r_[starts, len(order)])
    seen, final = before.copy(), before.copy()
    function = None if kind.startswith(("f16", "bf16")) else COMBINE.get(operation)
    if function is not None and len(starts) < counts.max():
        for lanes in np.split(order, starts[1:]):
            steps = function.accumulate(np.r_[before[lanes[:1]], values[0][lanes]], dtype=before.dtype)
            if flushed is not None and flushed[lanes[0]]:
                steps = _flushed_sums(steps, values[0][lanes])
            seen[lanes], final[lanes] = steps[:-1], steps[-1]
        return seen, final
    rank = np.arange(len(order)) - np.repeat(starts, counts)
    group = np.repeat(np.arange(len(starts)), counts)
    memory = before[order[starts]]
    by_rank = np.argsort(rank, kind="stable")
    for turn in np.split(by_rank, np.cumsum(np.bincount(rank))[:-1]):
        lanes, at = order[turn], group[turn]
        seen[lanes] = memory[at]
        memory[at] = _combined(operation, kind, memory[at], [value[lanes] for value in values], _of(flushed, lanes))
    final[order] = memory[group]
    return seen, final


def _of(flushed: Bools | None, lanes: Any) -> Bools | None:
    return None if flushed is None else flushed[lanes]


def _flushed_sums(steps: Any, values: Any) -> Any:
    """Computes running sums.  A subnormal sum or value becomes zero, which changes all later sums."""
    if (flush(steps) == steps).all() and (flush(values) == values).all():
        return steps
    sums = steps.copy()
    for place, value in enumerate(flush(values)):
        sums[place + 1 : place + 2] = flush(flush(sums[place : place + 1]) + value)
    return sums


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
    return new if operation == "exch" else COMBINE[operation](old, new)

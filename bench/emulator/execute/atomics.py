"""Runs `atom` and `red` (PTX ISA 8.7, sections 9.7.13.5 and 6), one lane after another, in lane order."""

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
    """Runs the atomic operation for each lane with a true predicate.  Returns the old values."""
    dtype = np.dtype(dtype_of(kind))
    lanes = c.lanes_under(guard)
    old = np.zeros(c.size, dtype)
    if not len(lanes):
        return old
    lane_addresses = c.vector(addresses)
    values = [c.vector(value)[lanes] for value in operands]
    run, mask = c.group.run, np.zeros(c.size, np.bool_)
    mask[lanes] = True
    observer, run.observer = run.observer, None
    so_far = run.changes
    try:
        (raw,) = access.load(c, space, lane_addresses, mask, dtype.itemsize, 1, instruction)
        old_values = raw[lanes].view(dtype)
        locations = _places(c, space, lane_addresses, lanes, instruction)
        flushed = _flushed(operation, kind, space, lane_addresses[lanes])
        old[lanes], new_values = _one_by_one(operation, kind, locations, old_values, values, flushed)
        changes = new_values.tobytes() != old_values.tobytes()
        final = np.zeros(c.size, _UNSIGNED[dtype.itemsize])
        final[lanes] = new_values.view(final.dtype)
        access.store(c, space, lane_addresses, (final,), mask, dtype.itemsize, instruction)
    finally:
        run.observer = observer
    _observe(c, space, lane_addresses[lanes], lanes, dtype.itemsize, order, instruction)
    if not changes:
        run.changes = so_far
        c.polls(instruction, lane_addresses[lanes])
    return old


def _observe(c: LaneContext, space: str, addresses: Any, lanes: Any, size: int, order: str, instruction: int) -> None:
    """Reports the atomic operation of the lanes to the race detector and the counter."""
    observer = c.group.run.observer
    if observer is None:
        return
    if space == "generic":
        windows = addresses >> np.uint64(60)
        for kind, memory_space in ((SHARED_WINDOW >> 60, "shared"), (0, "global")):
            in_space = windows == kind
            if in_space.any():
                _observe(c, memory_space, addresses[in_space], lanes[in_space], size, order, instruction)
    elif space == "shared":
        shared_addresses = addresses.astype(np.uint32)  # without the window of a generic address
        offsets = np.asarray(shared_offsets(c, shared_addresses, size, lanes, instruction)).astype(np.int64)
        observer.shared_atomic(c, lanes, offsets, size, instruction)
    else:
        observer.global_atomic(c, lanes, addresses, size, order, instruction)


def _places(c: LaneContext, space: str, where: Any, lanes: npt.NDArray[np.int64], instruction: int) -> Any:
    """Returns a number for each lane's memory location.  One shared address is a different location in each CTA."""
    addresses = where[lanes].astype(np.uint64)
    windows = addresses >> np.uint64(60)
    if space == "generic" and ((windows != 0) & (windows != SHARED_WINDOW >> 60)).any():
        raise Fault("an atomic operation on memory that is neither global nor shared", instruction)
    if c.slot is not None or space == "global":
        return addresses
    shared = (windows != 0) | (space == "shared")
    return addresses + shared * (c.slots[lanes].astype(np.uint64) << np.uint64(32))


def _flushed(operation: str, kind: str, space: str, addresses: Any) -> Bools | None:
    """Returns a mask of lanes that flush subnormals to zero, or None.  `add.f32` flushes only in global memory."""
    if operation != "add" or kind != "f32" or space == "shared":
        return None
    in_global: Bools = addresses >> np.uint64(60) == 0
    return in_global


def _one_by_one(
    operation: str, kind: str, places: Any, before: Any, values: list[Any], flushed: Bools | None
) -> tuple[Any, Any]:
    """Returns the value that each lane reads, and the final value at the lane's memory location.

    Lanes with the same location run in order.  If there are few locations, the code handles one location after another.
    Otherwise it handles the lanes in steps, and all lanes of one step have different locations."""
    order = np.argsort(places, kind="stable")
    sorted_ = places[order]
    first = np.r_[True, sorted_[1:] != sorted_[:-1]]
    if first.all():
        return before, np.ascontiguousarray(_combined(operation, kind, before, values, flushed))
    starts = np.flatnonzero(first)
    counts = np.diff(np.r_[starts, len(order)])
    lane_values, final = before.copy(), before.copy()
    function = None if kind.startswith(("f16", "bf16")) else COMBINE.get(operation)
    if function is not None and len(starts) < counts.max():
        for lanes in np.split(order, starts[1:]):
            steps = function.accumulate(np.r_[before[lanes[:1]], values[0][lanes]], dtype=before.dtype)
            if flushed is not None and flushed[lanes[0]]:
                steps = _flushed_sums(steps, values[0][lanes])
            lane_values[lanes], final[lanes] = steps[:-1], steps[-1]
        return lane_values, final
    rank = np.arange(len(order)) - np.repeat(starts, counts)
    group = np.repeat(np.arange(len(starts)), counts)
    memory = before[order[starts]]
    by_rank = np.argsort(rank, kind="stable")
    for step_lanes in np.split(by_rank, np.cumsum(np.bincount(rank))[:-1]):
        lanes, ids = order[step_lanes], group[step_lanes]
        lane_values[lanes] = memory[ids]
        memory[ids] = _combined(operation, kind, memory[ids], [value[lanes] for value in values], _of(flushed, lanes))
    final[order] = memory[group]
    return lane_values, final


def _of(flushed: Bools | None, lanes: Any) -> Bools | None:
    return None if flushed is None else flushed[lanes]


def _flushed_sums(steps: Any, values: Any) -> Any:
    """Computes running sums in which a subnormal sum or value becomes zero.  A zero changes all later sums."""
    if (flush(steps) == steps).all() and (flush(values) == values).all():
        return steps
    sums = steps.copy()
    for index, value in enumerate(flush(values)):
        sums[index + 1 : index + 2] = flush(flush(sums[index : index + 1]) + value)
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

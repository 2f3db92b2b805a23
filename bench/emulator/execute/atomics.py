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
from rooflab.bench.emulator.machine.sums import FLOATS, Sums
from rooflab.bench.emulator.numbers import half
from rooflab.bench.emulator.numbers.bits import REDUCTION_UFUNCS, UNSIGNED, flush
from rooflab.bench.emulator.text.kinds import dtype_of

Bools = npt.NDArray[np.bool_]


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
    old_result = np.zeros(c.size, dtype)
    if not len(lanes):
        return old_result
    lane_addresses = c.vector(addresses)
    op_values = [c.vector(operand)[lanes] for operand in operands]
    launch, lane_mask = c.group.run, np.zeros(c.size, np.bool_)
    lane_mask[lanes] = True
    observer, launch.observer = launch.observer, None
    change_count = launch.changes
    try:
        (loaded_values,) = access.load(c, space, lane_addresses, lane_mask, dtype.itemsize, 1, instruction)
        old_values = loaded_values[lanes].view(dtype)
        location_keys = _places(c, space, lane_addresses, lanes, instruction)
        flush_mask = _flushed(operation, kind, space, lane_addresses[lanes])
        old_result[lanes], new_values = _one_by_one(operation, kind, location_keys, old_values, op_values, flush_mask)
        has_changed = new_values.tobytes() != old_values.tobytes()
        stored_values = np.zeros(c.size, UNSIGNED[dtype.itemsize])
        stored_values[lanes] = new_values.view(stored_values.dtype)
        access.store(c, space, lane_addresses, (stored_values,), lane_mask, dtype.itemsize, instruction)
    finally:
        launch.observer = observer
    _observe(c, space, lane_addresses[lanes], lanes, dtype.itemsize, order, instruction)
    if operation == "add" and kind in FLOATS:
        record_sum(c, space, lane_addresses[lanes], lanes, (old_result[lanes], op_values[0]), kind, instruction)
    if not has_changed:
        launch.changes = change_count
        c.polls(instruction, lane_addresses[lanes])
    return old_result


def _observe(c: LaneContext, space: str, addresses: Any, lanes: Any, size: int, order: str, instruction: int) -> None:
    """Reports an atomic operation of the active lanes to the race detector and the access counter."""
    observer = c.group.run.observer
    if observer is None:
        return
    if space == "generic":
        window_numbers = addresses >> np.uint64(60)
        for window_number, memory_space in ((SHARED_WINDOW >> 60, "shared"), (0, "global")):
            space_mask = window_numbers == window_number
            if space_mask.any():
                _observe(c, memory_space, addresses[space_mask], lanes[space_mask], size, order, instruction)
    elif space == "shared":
        shared_addresses = addresses.astype(np.uint32)  # without the window of a generic address
        byte_offsets = np.asarray(shared_offsets(c, shared_addresses, size, lanes, instruction)).astype(np.int64)
        observer.shared_atomic(c, lanes, byte_offsets, size, instruction)
    else:
        observer.global_atomic(c, lanes, addresses, size, order, instruction)


def record_sum(
    c: LaneContext, space: str, addresses: Any, lanes: Any, values: tuple[Any, Any], kind: str, instruction: int
) -> None:
    """Records additions of floats by lanes, one after another: `values` are the old values and those that are added."""
    group, launch = c.group, c.group.run
    if not launch.checks.races or instruction in launch.unordered_sums:
        return
    size, pairs = values[0].itemsize, list[tuple[Sums, Any, Any]]()
    is_shared = np.full(len(lanes), space == "shared")
    if space == "generic":
        is_shared = addresses >> np.uint64(60) != 0
    if (shared_lanes := np.flatnonzero(is_shared)).size:
        shared_addresses = addresses[shared_lanes].astype(np.uint32)
        offsets = np.asarray(shared_offsets(c, shared_addresses, size, lanes[shared_lanes], instruction))
        group.sums = group.sums or Sums(len(group.shared))
        pairs.append((group.sums, offsets.astype(np.int64), shared_lanes))
    global_lanes = np.flatnonzero(~is_shared)
    for allocation, inside in group.memory.parts(addresses[global_lanes]):
        if allocation.base not in launch.sums:
            launch.sums[allocation.base] = Sums(allocation.size)
        offsets = addresses[global_lanes[inside]].astype(np.int64) - allocation.base
        pairs.append((launch.sums[allocation.base], offsets, global_lanes[inside]))
    warps_per_cta = group.lanes_per_cta // 32
    warps = np.asarray(group.ctas)[c.slots[lanes]] * warps_per_cta + c.warps[lanes] % warps_per_cta
    for sums, offsets, chosen in pairs:
        if sums.add(offsets, warps[chosen], values[0][chosen], values[1][chosen], kind):
            launch.unordered_sums[instruction] = None


def _places(c: LaneContext, space: str, where: Any, lanes: npt.NDArray[np.int64], instruction: int) -> Any:
    """Returns a key for the memory location that each lane accesses. Equal shared addresses in different CTAs get
    different keys."""
    addresses = where[lanes].astype(np.uint64)
    window_numbers = addresses >> np.uint64(60)
    if space == "generic" and ((window_numbers != 0) & (window_numbers != SHARED_WINDOW >> 60)).any():
        raise Fault("an atomic operation on memory that is neither global nor shared", instruction)
    if c.slot is not None or space == "global":
        return addresses
    is_shared = (window_numbers != 0) | (space == "shared")
    return addresses + is_shared * (c.slots[lanes].astype(np.uint64) << np.uint64(32))


def _flushed(operation: str, kind: str, space: str, addresses: Any) -> Bools | None:
    """Returns a mask of the lanes whose atomic operation flushes subnormals to zero. Only `add.f32` on global memory
    flushes. None means no lane."""
    if operation != "add" or kind != "f32" or space == "shared":
        return None
    is_global: Bools = addresses >> np.uint64(60) == 0
    return is_global


def _one_by_one(
    operation: str, kind: str, places: Any, before: Any, values: list[Any], flushed: Bools | None
) -> tuple[Any, Any]:
    """Runs an atomic operation lane by lane. Returns the old value that each lane reads, and the final value at its
    memory location."""
    sort_order = np.argsort(places, kind="stable")
    sorted_keys = places[sort_order]
    is_group_start = np.r_[True, sorted_keys[1:] != sorted_keys[:-1]]
    if is_group_start.all():
        return before, np.ascontiguousarray(combined(operation, kind, before, values, flushed))
    group_starts = np.flatnonzero(is_group_start)
    group_sizes = np.diff(np.r_[group_starts, len(sort_order)])
    lane_values, final_values = before.copy(), before.copy()
    reduction_ufunc = None if kind.startswith(("f16", "bf16")) else REDUCTION_UFUNCS.get(operation)
    if reduction_ufunc is not None and len(group_starts) < group_sizes.max():
        for lanes in np.split(sort_order, group_starts[1:]):
            running_values = reduction_ufunc.accumulate(np.r_[before[lanes[:1]], values[0][lanes]], dtype=before.dtype)
            if flushed is not None and flushed[lanes[0]]:
                running_values = _flushed_sums(running_values, values[0][lanes])
            lane_values[lanes], final_values[lanes] = running_values[:-1], running_values[-1]
        return lane_values, final_values
    position_ranks = np.arange(len(sort_order)) - np.repeat(group_starts, group_sizes)
    position_groups = np.repeat(np.arange(len(group_starts)), group_sizes)
    memory = before[sort_order[group_starts]]
    rank_order = np.argsort(position_ranks, kind="stable")
    for positions in np.split(rank_order, np.cumsum(np.bincount(position_ranks))[:-1]):
        lanes, group_ids = sort_order[positions], position_groups[positions]
        lane_values[lanes] = memory[group_ids]
        memory[group_ids] = combined(
            operation, kind, memory[group_ids], [operand_value[lanes] for operand_value in values], _of(flushed, lanes)
        )
    final_values[sort_order] = memory[position_groups]
    return lane_values, final_values


def _of(flushed: Bools | None, lanes: Any) -> Bools | None:
    return None if flushed is None else flushed[lanes]


def _flushed_sums(steps: Any, values: Any) -> Any:
    """Recomputes running sums with subnormals flushed. Each subnormal value or sum becomes zero before the next
    addition."""
    if (flush(steps) == steps).all() and (flush(values) == values).all():
        return steps
    running_sums = steps.copy()
    for index, next_value in enumerate(flush(values)):
        running_sums[index + 1 : index + 2] = flush(flush(running_sums[index : index + 1]) + next_value)
    return running_sums


def combined(operation: str, kind: str, old: Any, values: list[Any], flushed: Bools | None = None) -> Any:
    """Returns the new values of memory, of n lanes: `[n]`.  `old` `[n]` are the old values, and `values` the operands,
    of NumPy's type of `kind`; f16 and bf16 are raw bits (uint16, uint32 for pairs) and are rounded once.  min and max
    ignore a NaN.  `flushed` `[n]` tells which lanes flush subnormals; None means none."""
    operand_values = values[0]
    if flushed is not None:
        flushed_sum = flush(flush(old) + flush(operand_values))
        return flushed_sum if flushed.all() else np.where(flushed, flushed_sum, old + operand_values)
    if kind.startswith(("f16", "bf16")):
        half_type = kind.removesuffix("x2")
        function_by_op: dict[str, Any] = {"add": half.add, "min": half.fmin, "max": half.fmax}
        return function_by_op[operation](old, operand_values, half_type)
    if operation == "cas":
        return np.where(old == operand_values, values[1], old)
    if operation == "inc":
        return np.where(old >= operand_values, np.zeros_like(old), old + 1)
    if operation == "dec":
        return np.where((old == 0) | (old > operand_values), operand_values, old - 1)
    return operand_values if operation == "exch" else REDUCTION_UFUNCS[operation](old, operand_values)

"""Loads from and stores to global memory.  Each access uses the allocation that holds its addresses."""

from __future__ import annotations

from typing import Any

import numpy as np

from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.memory import UNIT_DTYPES, Allocation, BadAccess, assign
from rooflab.bench.emulator.machine.run import Fault


def lane_of(c: LaneContext, addresses: Any, address: int, active: Any) -> int:
    """Returns the number of the first lane that accesses `address`.  `active` selects the lanes; None means all."""
    lane_index = 0 if isinstance(addresses, np.generic) or not addresses.ndim else int((addresses == address).argmax())
    return int(c.lanes[lane_index if active is None else active[lane_index]])


def load_located(
    c: LaneContext,
    addresses: Any,
    size: int,
    active: Any,
    instruction: int,
    *,
    copy: bool = False,
    reduces: bool = False,
) -> Any:
    """Loads a value of `size` bytes from each of `addresses` in global memory.  Raises `Fault` on an address outside
    every allocation.

    `copy` is true if an asynchronous copy loads the values.  It is false if the lanes load them.  `reduces` is true if
    the load belongs to a reduction, which also stores."""
    unit_location = _located(c, addresses, size, active, instruction)
    if unit_location is None:
        loaded_units = np.empty(len(addresses), UNIT_DTYPES[size])
        for lane_position, address in enumerate(addresses):
            lane = np.array([lane_position if active is None else active[lane_position]])
            loaded_units[lane_position] = load_located(c, address, size, lane, instruction, copy=copy, reduces=reduces)
        return loaded_units
    allocation, unit_index = unit_location
    if c.group.run.observer is not None:
        c.group.run.observer.global_read(c, active, allocation, addresses, size, instruction, copy, reduces)
    if allocation.written is not None:
        _check_written(c, allocation, addresses, size, active, instruction)
    unit_view = allocation.view(size)
    return unit_view[unit_index] if isinstance(unit_index, int) else unit_view.take(unit_index)


def store_located(
    c: LaneContext,
    addresses: Any,
    value: Any,
    size: int,
    active: Any,
    instruction: int,
    *,
    copy: bool = False,
    reduces: bool = False,
) -> None:
    """Stores a value of `size` bytes to each of `addresses` in global memory.  Raises `Fault` on an address outside
    every allocation or in constant memory.

    `copy` is true if an asynchronous copy stores the values.  It is false if the lanes store them.  `reduces` is true
    if the store belongs to a reduction."""
    unit_location = _located(c, addresses, size, active, instruction)
    if unit_location is None:
        for lane_position, address in enumerate(addresses):
            lane_value = value if isinstance(value, np.generic) else value[lane_position]
            lane = np.array([lane_position if active is None else active[lane_position]])
            store_located(c, address, lane_value, size, lane, instruction, copy=copy, reduces=reduces)
        return
    allocation, unit_index = unit_location
    if allocation.read_only:
        raise Fault(f"a store to {allocation.name}, which is constant", instruction, rule="out-of-bounds")
    if c.group.run.observer is not None:
        unit_view = allocation.view(size)
        memory_reader = lambda: unit_view[unit_index] if isinstance(unit_index, int) else unit_view.take(unit_index)
        c.group.run.observer.global_write(
            c, active, allocation, addresses, size, instruction, copy, reduces, value, memory_reader
        )
    if allocation.written is not None:
        unit_starts = np.atleast_1d(addresses).astype(np.int64) - allocation.base
        for byte_index in range(size):
            allocation.written[unit_starts + byte_index] = True
    if c.group.run.stored is not None:
        c.group.run.stored.append((np.atleast_1d(addresses).astype(np.int64), size))
    assign(allocation.view(size), unit_index, value)


def _located(c: LaneContext, addresses: Any, size: int, active: Any, instruction: int) -> tuple[Allocation, Any] | None:
    try:
        located = c.group.memory.locate(addresses, size)
    except BadAccess as bad:
        raise Fault(str(bad), instruction, lane_of(c, addresses, bad.address, active), bad.rule) from None
    bounds = None if located is None else located[0].bounds
    if bounds is not None and (outside := bounds.outside(addresses, size)) is not None:
        raise Fault(outside[1], instruction, lane_of(c, addresses, outside[0], active), "out-of-bounds")
    return located


def _check_written(
    c: LaneContext, allocation: Allocation, addresses: Any, size: int, active: Any, instruction: int
) -> None:
    assert allocation.written is not None
    unit_starts = np.atleast_1d(addresses).astype(np.int64) - allocation.base
    for byte_index in range(size):
        written_flags = allocation.written[unit_starts + byte_index]
        if not written_flags.all():
            first_start = int(unit_starts[~written_flags][0])
            byte_offset = first_start + byte_index
            text = f"a read of byte {byte_offset} of {allocation.name}, which nobody has written"
            if not allocation.partly_written:
                lane = lane_of(c, addresses, first_start + allocation.base, active)
                raise Fault(text, instruction, lane, "unwritten-read")
            # Of a tile of which an earlier launch wrote one triangle, a kernel loads all and takes the triangle.
            c.group.run.unwritten_reads.setdefault(instruction, text)
            return

"""Runs loads and stores of every state space, for lanes that run together (PTX ISA 8.7, sections 5.1, 9.7.9).

Values are unsigned integers of the element's width.  The instruction decides how their bits are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.global_memory import lane_of, load_located, store_located
from rooflab.bench.emulator.machine.memory import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    POISON,
    RANK_SHIFT,
    SHARED_WINDOW,
    SHIFT,
    UNIT_DTYPES,
    assign,
)
from rooflab.bench.emulator.machine.run import Fault
from rooflab.bench.emulator.numbers.bits import UNSIGNED

WRITTEN_UNITS = {size: np.ones(size, np.bool_).view(UNIT_DTYPES[size])[0] for size in UNIT_DTYPES}
"""By unit size in bytes: the flags of a unit whose bytes are all written."""
WINDOW_MASK = (1 << 60) - 1
"""The bits of a generic address within its window."""
Values = tuple[Any, ...]
_INVALID_OFFSET = 0xFFFFFFF0
_SPACE_NAMES = {SHARED_WINDOW >> 60: "shared", LOCAL_WINDOW >> 60: "local", PARAM_WINDOW >> 60: "param"}


def load(c: LaneContext, space: str, addresses: Any, mask: Any, width: int, count: int, instruction: int) -> Values:
    """Loads `count` values of `width` bytes for each lane in `mask` (None means all lanes).  Other lanes get 0."""
    active_lanes = _active(mask, c.size)
    if active_lanes is not None and not len(active_lanes):
        return (UNSIGNED[width].type(0),) * count
    lane_addresses = addresses if active_lanes is None or isinstance(addresses, np.generic) else addresses[active_lanes]
    lane_data = _LOADERS[space](c, lane_addresses, width * count, active_lanes, instruction)
    values = _unpacked(lane_data, width, count)
    if active_lanes is None:
        return values
    scattered_values = np.zeros((count, c.size), UNSIGNED[width])
    for lane_values, element_value in zip(scattered_values, values, strict=True):
        lane_values[active_lanes] = element_value
    return tuple(scattered_values)


def store(c: LaneContext, space: str, addresses: Any, values: Values, mask: Any, width: int, instruction: int) -> None:
    """Stores the `values` of each lane in `mask` at consecutive addresses.  Each value has `width` bytes."""
    active_lanes = _active(mask, c.size)
    if active_lanes is not None:
        if not len(active_lanes):
            return
        addresses = addresses if isinstance(addresses, np.generic) else addresses[active_lanes]
        values = tuple(value if isinstance(value, np.generic) else value[active_lanes] for value in values)
    lane_count = c.size if active_lanes is None else len(active_lanes)
    c.group.run.changes += 1
    _STORERS[space](c, addresses, _packed(values, width, lane_count), width * len(values), active_lanes, instruction)


def _active(mask: Any, size: int) -> npt.NDArray[np.int64] | None:
    """Returns the indices of the lanes that `mask` selects, or None if it selects all lanes."""
    if mask is None or isinstance(mask, np.bool_):
        return None if mask is None or mask else np.empty(0, np.int64)
    active_lanes = np.flatnonzero(mask)
    return None if len(active_lanes) == size else active_lanes


def _unpacked(raw: Any, width: int, count: int) -> Values:
    """Splits the value of each lane into `count` elements of `width` bytes. Returns one array of lanes per element."""
    if count == 1:
        return (raw,)
    element_dtype = UNSIGNED[width]
    if isinstance(raw, np.generic):
        return tuple(np.array([raw]).view(element_dtype))
    return tuple(np.ascontiguousarray(raw.view(element_dtype).reshape(-1, count).T))


def _packed(values: Values, width: int, lanes: int) -> Any:
    """Joins several values of `width` bytes into one wider value per lane. Returns a scalar if all values are
    scalars."""
    if len(values) == 1:
        return values[0]
    element_dtype, unit_dtype = UNSIGNED[width], UNIT_DTYPES[width * len(values)]
    if all(isinstance(element_value, np.generic) for element_value in values):
        return np.array(values, element_dtype).view(unit_dtype)[0]
    element_rows = np.empty((lanes, len(values)), element_dtype)
    for element_index, element_value in enumerate(values):
        element_rows[:, element_index] = element_value
    return element_rows.view(unit_dtype)[:, 0]


# Shared memory, of a CTA and of its cluster


def shared_offsets(c: LaneContext, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    """Returns offsets in the CTAs' shared memory.  Raises `Fault` if an address is misaligned or outside the memory."""
    max_address = c.group.run.shared_limit - size
    is_scalar = isinstance(addresses, np.generic)
    peak_address = int(addresses) if is_scalar else int(addresses.max())
    address_bits = peak_address if is_scalar else int(np.bitwise_or.reduce(addresses))
    if address_bits & (size - 1):
        bad_address = peak_address if is_scalar else int(addresses[(addresses & (size - 1)) != 0][0])
        lane = lane_of(c, addresses, bad_address, active)
        raise Fault(
            f"shared address 0x{bad_address:x} is not a multiple of {size} bytes", instruction, lane, "misaligned"
        )
    base_offset = c.shared_base
    if peak_address > max_address:
        if 1 <= peak_address >> RANK_SHIFT <= len(c.group.ctas) and _reaches_cluster(c, instruction):
            return _cluster_offsets(c, addresses, max_address, active, instruction)
        message = f"{size} bytes at shared address 0x{peak_address:x} lie outside the {c.group.run.shared_limit} there"
        raise Fault(message, instruction, lane_of(c, addresses, peak_address, active), "out-of-bounds")
    if isinstance(base_offset, int):
        return addresses if not base_offset else addresses + np.int64(base_offset)
    base_offset = base_offset if active is None else base_offset[active]
    return base_offset + addresses


def _reaches_cluster(c: LaneContext, instruction: int) -> bool:
    """Tells whether an instruction may access the shared memory of another CTA. An opcode with plain `.shared` may
    not."""
    opcode = c.group.program.kernel.instructions[instruction].opcode
    return "shared::cluster" in opcode or ".shared" not in opcode


def _cluster_offsets(c: LaneContext, addresses: Any, limit: int, active: Any, instruction: int) -> Any:
    rank_fields = (np.asarray(addresses) >> RANK_SHIFT).astype(np.int64)
    cta_offsets = (np.asarray(addresses) & ((1 << RANK_SHIFT) - 1)).astype(np.int64)
    if int(cta_offsets.max()) > limit:
        text = f"shared::cluster address 0x{int(np.max(addresses)):x} lies outside the cluster's memory"
        raise Fault(text, instruction, rule="out-of-bounds")
    lane_slots = c.slots if active is None else c.slots[active]
    target_slots = np.where(rank_fields > 0, rank_fields - 1, lane_slots if rank_fields.ndim else lane_slots[0])
    for cta_slot in map(int, np.unique(target_slots)):
        first_lane = cta_slot * c.group.lanes_per_cta
        if not c.group.alive[first_lane : first_lane + c.group.lanes_per_cta].any():
            text = f"the shared memory of CTA {c.group.ctas[cta_slot]}, which has ended"
            raise Fault(text, instruction, rule="early-exit")
    cluster_offsets = target_slots * c.group.shared_size + cta_offsets
    return cluster_offsets if cluster_offsets.ndim else np.int64(cluster_offsets)


def load_shared(c: LaneContext, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    """Loads units of `size` bytes of shared memory."""
    byte_offsets = shared_offsets(c, addresses, size, active, instruction)
    cta_group = c.group
    if cta_group.run.observer is not None:
        cta_group.run.observer.shared_read(c, active, byte_offsets, size, instruction)
    if cta_group.written is not None:
        check_written(c, byte_offsets, size, instruction)
    unit_index = byte_offsets >> SHIFT[size]
    shared_view = cta_group.views[size]
    return shared_view.take(unit_index)


def _first_unwritten(flags: npt.NDArray[np.bool_], offsets: Any, size: int) -> int | None:
    """Returns the index of the first unit with a byte that was never written, or None."""
    unit_flags = flags.view(UNIT_DTYPES[size]).take(offsets >> SHIFT[size]).view(np.bool_)
    return None if unit_flags.all() else int(unit_flags.argmin()) // size


def check_written(c: LaneContext, offsets: Any, size: int, instruction: int) -> None:
    """Raises `Fault` on a read of shared memory that was never written."""
    written_flags = c.group.written
    assert written_flags is not None
    if (unit := _first_unwritten(written_flags, np.atleast_1d(offsets), size)) is not None:
        address = int(np.atleast_1d(offsets)[unit]) % c.group.shared_size
        text = f"a read of shared memory at 0x{address:x}, which nobody has written"
        raise Fault(text, instruction, rule="unwritten-read")


def store_shared(c: LaneContext, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    """Stores units of `size` bytes to shared memory."""
    byte_offsets = shared_offsets(c, addresses, size, active, instruction)
    cta_group = c.group
    if cta_group.run.observer is not None:
        cta_group.run.observer.shared_write(c, active, byte_offsets, size, instruction, value)
    unit_index = byte_offsets >> SHIFT[size]
    if cta_group.written is not None:
        np.put(cta_group.written.view(UNIT_DTYPES[size]), unit_index, WRITTEN_UNITS[size])
    assign(cta_group.views[size], unit_index, value)


# Local memory and parameters


def _local_offsets(c: LaneContext, addresses: Any, size: int, active: Any, instruction: int) -> npt.NDArray[np.int64]:
    group = c.group
    local_bytes = group.run.local_size
    if group.local is None:
        group.local = np.full(len(group.alive) * local_bytes, POISON, np.uint8)
        group.local_written = np.zeros(len(group.local), np.bool_) if group.run.checks.uninitialised else None
    lane_offsets = np.asarray(addresses).astype(np.int64) & WINDOW_MASK
    max_offset = int(lane_offsets.max())
    if max_offset > local_bytes - size:
        lane = lane_of(c, lane_offsets, max_offset, active)
        text = f"{size} bytes at local address 0x{max_offset:x} lie outside the {local_bytes} there"
        raise Fault(text, instruction, lane, "out-of-bounds")
    _check_aligned(lane_offsets, size, "local", instruction)
    lane_numbers = c.lanes if active is None else c.lanes[active]
    return lane_numbers * local_bytes + lane_offsets


def _check_aligned(inside: Any, size: int, space: str, instruction: int) -> None:
    if int(np.bitwise_or.reduce(inside, axis=None)) & (size - 1):
        bad_address = int(np.atleast_1d(inside)[np.atleast_1d(inside) & (size - 1) != 0][0])
        text = f"{space} address 0x{bad_address:x} is not a multiple of {size} bytes"
        raise Fault(text, instruction, rule="misaligned")


def load_local(c: LaneContext, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    """Loads units of `size` bytes of each lane's local memory.  Raises `Fault` on bytes that the lane never wrote."""
    byte_offsets = _local_offsets(c, addresses, size, active, instruction)
    assert c.group.local is not None
    written_flags = c.group.local_written
    # The result of a call (`ld.param`) is written by the function, which is not emulated.
    if written_flags is None or ".param" in c.group.program.kernel.instructions[instruction].opcode:
        bad_lane = None
    else:
        bad_lane = _first_unwritten(written_flags, byte_offsets, size)
    if bad_lane is not None:
        lane = int((c.lanes if active is None else c.lanes[active])[bad_lane])
        text = f"a read of local memory at 0x{int(byte_offsets[bad_lane]) % c.group.run.local_size:x}"
        raise Fault(f"{text}, which the thread has not written", instruction, lane, "unwritten-read")
    return c.group.local.view(UNIT_DTYPES[size]).take(byte_offsets >> SHIFT[size])


def store_local(c: LaneContext, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    """Stores units of `size` bytes to each lane's local memory."""
    byte_offsets = _local_offsets(c, addresses, size, active, instruction)
    assert c.group.local is not None
    c.group.local.view(UNIT_DTYPES[size])[byte_offsets >> SHIFT[size]] = value
    if c.group.local_written is not None:
        c.group.local_written.view(UNIT_DTYPES[size])[byte_offsets >> SHIFT[size]] = WRITTEN_UNITS[size]


def load_param(c: LaneContext, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    """Loads units of `size` bytes of the kernel's parameters."""
    parameter_data = c.group.run.parameter_bytes
    byte_offsets = np.asarray(addresses).astype(np.int64) & WINDOW_MASK
    if int(byte_offsets.max()) > len(parameter_data) - size:
        text = f"{size} bytes at parameter address 0x{int(byte_offsets.max()):x} lie behind the last"
        raise Fault(text, instruction, rule="out-of-bounds")
    _check_aligned(byte_offsets, size, "parameter", instruction)
    lane_data = parameter_data.view(UNIT_DTYPES[size])[byte_offsets >> SHIFT[size]]
    return lane_data if isinstance(lane_data, np.ndarray) and lane_data.ndim else lane_data[()]


def _refused(what: str, c: LaneContext, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    raise Fault(f"a store to {what}", instruction, rule="out-of-bounds")


# Generic addresses


def _windows(addresses: Any) -> Iterator[tuple[str, Any]]:
    """Yields each state space of generic addresses with the indices of its lanes; None if one space has all lanes."""
    lane_windows = np.asarray(addresses) >> np.uint64(60)
    first_window = int(lane_windows.flat[0])
    if (lane_windows == first_window).all():
        yield _SPACE_NAMES.get(first_window, "global"), None
        return
    for window in np.unique(lane_windows):
        yield _SPACE_NAMES.get(int(window), "global"), np.flatnonzero(lane_windows == window)


def _of(lanes: Any, values: Any) -> Any:
    return values if lanes is None or isinstance(values, np.generic) else values[lanes]


def _inner(space: str, addresses: Any) -> Any:
    if space == "shared":
        # An offset beyond 32 bits must not wrap into a valid one.
        return np.minimum(addresses & np.uint64(WINDOW_MASK), np.uint64(_INVALID_OFFSET)).astype(np.uint32)
    return addresses


def _load_generic(c: LaneContext, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    lane_data = np.empty(np.size(addresses), UNIT_DTYPES[size])
    for space, lanes in _windows(addresses):
        space_lanes = lanes if active is None else _of(lanes, active)
        loaded = _LOADERS[space](c, _inner(space, _of(lanes, addresses)), size, space_lanes, instruction)
        if lanes is None:
            return loaded
        lane_data[lanes] = loaded
    return lane_data


def _store_generic(c: LaneContext, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    for space, lanes in _windows(addresses):
        space_lanes = lanes if active is None else _of(lanes, active)
        _STORERS[space](c, _inner(space, _of(lanes, addresses)), _of(lanes, value), size, space_lanes, instruction)


_LOADERS = {
    "global": load_located,
    "const": load_located,
    "shared": load_shared,
    "local": load_local,
    "param": load_param,
    "generic": _load_generic,
}
_STORERS: dict[str, Callable[..., None]] = {
    "global": store_located,
    "const": partial(_refused, "constant memory"),
    "shared": store_shared,
    "local": store_local,
    "param": partial(_refused, "a kernel's parameter"),
    "generic": _store_generic,
}

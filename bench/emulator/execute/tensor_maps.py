"""Reads and writes the tensor maps that TMA uses; runs the `tensormap` instructions (PTX ISA 8.7, 9.7.9.28)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.context import LaneContext, value_of
from rooflab.bench.emulator.machine.global_memory import load_located, store_located
from rooflab.bench.emulator.machine.memory import PARAM_WINDOW, SHARED_WINDOW
from rooflab.bench.emulator.machine.run import Fault
from rooflab.bench.emulator.tiles import tensor_map

_CHUNK_OFFSETS = np.arange(0, tensor_map.MAP_BYTES, 16, dtype=np.uint64)


def load_bytes(
    c: LaneContext, addresses: Any, size: int, instruction: int, *, lane: int = 0, reduces: bool = False
) -> npt.NDArray[Any]:
    """Reads units of `size` bytes from global memory, for a copy that `lane` issued."""
    lanes = np.full(np.size(addresses), lane)
    return np.asarray(load_located(c, addresses, size, lanes, instruction, copy=True, reduces=reduces))


def store_bytes(
    c: LaneContext,
    addresses: Any,
    data: npt.NDArray[Any],
    size: int,
    instruction: int,
    *,
    lane: int,
    reduces: bool = False,
) -> None:
    """Writes units of `size` bytes to global memory, for a copy that `lane` issued."""
    store_located(c, addresses, data, size, np.full(np.size(addresses), lane), instruction, copy=True, reduces=reduces)


def read_map(c: LaneContext, address: int, lane: int, instruction: int) -> bytes:
    """Returns the bytes of a tensor map at a generic address, for a TMA copy.  Also checks for a missing fence."""
    if c.group.maps is not None:
        map_writer = c.group.maps.use(*_warp(c, lane), address)
        if map_writer is not None:
            c.group.run.map_races[instruction, map_writer] = None
    return map_bytes(c, address, lane, instruction)


def map_bytes(c: LaneContext, address: int, lane: int, instruction: int) -> bytes:
    """Returns the bytes of a tensor map at a generic address.  Unwritten bytes of shared memory count as zero."""
    address_window, group = address >> 60, c.group
    if address_window == PARAM_WINDOW >> 60:
        map_start = address & ((1 << 40) - 1)
        return bytes(group.run.parameter_bytes[map_start : map_start + tensor_map.MAP_BYTES])
    if address_window != SHARED_WINDOW >> 60:
        return load_bytes(c, np.uint64(address) + _CHUNK_OFFSETS, 16, instruction, lane=lane).tobytes()
    map_range = _shared_range(c, address, lane, instruction)
    if group.run.observer is not None:
        chunk_offsets = map_range.start + _CHUNK_OFFSETS.astype(np.int64)
        group.run.observer.shared_read(c, np.full(len(chunk_offsets), lane), chunk_offsets, 16, instruction)
    map_copy = group.shared[map_range].copy()
    if group.written is not None:
        map_copy[~group.written[map_range]] = 0
    return map_copy.tobytes()


def write_map(c: LaneContext, address: int, data: bytes, lane: int, instruction: int) -> None:
    """Writes a tensor map to a generic address."""
    group = c.group
    if address >> 60 != SHARED_WINDOW >> 60:
        if group.maps is not None:
            group.maps.write(*_warp(c, lane), address, instruction)
        chunks = np.frombuffer(data, np.complex128)
        store_bytes(c, np.uint64(address) + _CHUNK_OFFSETS, chunks, 16, instruction, lane=lane)
        return
    map_range = _shared_range(c, address, lane, instruction)
    if group.run.observer is not None:
        chunk_offsets = map_range.start + _CHUNK_OFFSETS.astype(np.int64)
        group.run.observer.shared_write(c, np.full(len(chunk_offsets), lane), chunk_offsets, 16, instruction, None)
    group.shared[map_range] = np.frombuffer(data, np.uint8)
    if group.written is not None:
        group.written[map_range] = True


def _warp(c: LaneContext, lane: int) -> tuple[int, int]:
    """Returns two indices: a lane's CTA, and the lane's warp in this CTA.  If the grid has clusters, the indices are
    the lane's cluster, and the lane's warp in this cluster."""
    return divmod(int(c.warps[lane]), c.group.race_warps)


def _shared_range(c: LaneContext, address: int, lane: int, instruction: int) -> slice:
    offset = address & 0xFFFFFFFF
    if offset + tensor_map.MAP_BYTES > c.group.run.shared_limit:
        text = f"a tensor map at shared address 0x{offset:x} ends outside the CTA's memory"
        raise Fault(text, instruction, rule="out-of-bounds")
    start = int(c.slots[lane]) * c.group.shared_size + offset
    return slice(start, start + tensor_map.MAP_BYTES)


def replace(
    c: LaneContext, space: str, addresses: Any, field: str, ordinal: int, value: Any, guard: Any, instruction: int
) -> None:
    """Runs `tensormap.replace`."""
    for lane in map(int, c.lanes_under(guard)):
        address = value_of(addresses, lane) | (SHARED_WINDOW if space == "shared" else 0)
        stride_unit = 16 if c.group.run.old_strides else 1
        try:
            new_map = tensor_map.replace(
                map_bytes(c, address, lane, instruction), field, ordinal, value_of(value, lane), stride_unit=stride_unit
            )
        except ValueError as error:
            raise Fault(str(error), instruction) from None
        write_map(c, address, new_map, lane, instruction)


def copy(c: LaneContext, targets: Any, sources: Any, guard: Any, instruction: int) -> None:
    """Runs `tensormap.cp_fenceproxy`: copies a tensor map from shared to global memory, once for each warp."""
    for lane in _one_lane_each(c, targets, guard):
        map_data = map_bytes(c, value_of(sources, lane) & 0xFFFFFFFF | SHARED_WINDOW, lane, instruction)
        write_map(c, value_of(targets, lane), map_data, lane, instruction)


def fence(c: LaneContext, addresses: Any, guard: Any) -> None:
    """Runs `fence.proxy.tensormap::generic` for the tensor map at an address."""
    if c.group.maps is not None:
        for lane in _one_lane_each(c, addresses, guard):
            c.group.maps.fence(*_warp(c, lane), value_of(addresses, lane))


def _one_lane_each(c: LaneContext, addresses: Any, guard: Any) -> Iterator[int]:
    """Yields one lane for each pair of a warp and an address. Several lanes of a warp may use the same address."""
    seen_addresses: set[tuple[int, int]] = set()
    for lane in map(int, c.lanes_under(guard)):
        warp_address = int(c.warps[lane]), value_of(addresses, lane)
        if warp_address not in seen_addresses:
            seen_addresses.add(warp_address)
            yield lane

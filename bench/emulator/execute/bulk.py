"""Runs bulk copies, TMA, and stores into another CTA's shared memory (PTX ISA 8.7, sections 9.7.9.12, 25, 27)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.execute import tensor_maps
from rooflab.bench.emulator.execute.atomics import combined, record_sum
from rooflab.bench.emulator.machine import access
from rooflab.bench.emulator.machine.access import check_written, shared_offsets
from rooflab.bench.emulator.machine.context import LaneContext, value_of
from rooflab.bench.emulator.machine.memory import POISON, RANK_SHIFT, SHIFT, UNIT_DTYPES
from rooflab.bench.emulator.machine.run import CtaGroup, Fault
from rooflab.bench.emulator.machine.sums import FLOATS
from rooflab.bench.emulator.machine.transfers import Transfer
from rooflab.bench.emulator.machine.waiting import waiting_of
from rooflab.bench.emulator.races.vector_clocks import TMA_LOAD
from rooflab.bench.emulator.tiles import tensor_map
from rooflab.bench.emulator.tiles.tensor_map import TileIndex, tile_index

UnitArray = npt.NDArray[Any]
"""The data of a copy: an array of items of 1 to 16 bytes."""
MAP_ALIGNMENT = 64
"""The alignment in bytes of the address of a tensor map that a copy uses (`alignas` of the driver's CUtensorMap)."""


def _destinations(group: CtaGroup, slot: int, barrier_slot: int, multicast: int | None, instruction: int) -> list[int]:
    """Returns the indices of the CTAs in the cluster that receive a bulk copy. The copy signals one mbarrier in each of
    them. Raises `Fault` for an impossible destination."""
    if multicast is None:
        if barrier_slot != slot:
            raise Fault("the copy's destination and its mbarrier lie in different CTAs", instruction)
        return [slot]
    if multicast >> len(group.ctas):
        raise Fault(f"a multicast to 0x{multicast:x}, and the cluster has {len(group.ctas)} CTAs", instruction)
    return [cta_rank for cta_rank in range(len(group.ctas)) if multicast >> cta_rank & 1]


def _place_of(c: LaneContext, addresses: Any, lane: int) -> tuple[int, int]:
    """Splits a lane's shared::cluster address into the CTA's index and the address in this CTA. An address without a
    CTA belongs to the lane's own."""
    rank_field, offset = divmod(value_of(addresses, lane), 1 << RANK_SHIFT)
    return (rank_field - 1 if rank_field else int(c.slots[lane])), offset


def _box(
    c: LaneContext, lane: int, tensor: Any, coordinates: tuple[Any, ...], shared: Any, instruction: int
) -> tuple[tensor_map.TensorMap, TileIndex, tuple[int, int]]:
    """Returns the tensor map and the addresses of a lane's copy, and the CTA and the address in it where the box is."""
    map_address, place = value_of(tensor, lane), _place_of(c, shared, lane)
    if map_address % MAP_ALIGNMENT:
        text = f"a tensor map at 0x{map_address:x}, not a multiple of {MAP_ALIGNMENT} bytes"
        raise Fault(text, instruction, rule="misaligned")
    try:
        box = tensor_map.unpack(tensor_maps.read_map(c, map_address, lane, instruction))
        tile = tile_index(box, [value_of(coordinate, lane) for coordinate in coordinates], place[1])
    except ValueError as error:
        raise Fault(str(error), instruction) from None
    _check_room(c.group, place[1], box.box_bytes, instruction)
    return box, tile, place


def tensor_load(
    c: LaneContext,
    shared: Any,
    tensor: Any,
    coordinates: tuple[Any, ...],
    barrier: Any,
    multicast: Any,
    guard: Any,
    instruction: int,
) -> None:
    """Runs `cp.async.bulk.tensor` from global to shared memory."""
    for lane in map(int, c.lanes_under(guard)):
        box, tile, target = _box(c, lane, tensor, coordinates, shared, instruction)
        read = partial(_gathered, c, box, tile, lane, instruction)
        unit, places = tile.unit_bytes, tile.shared_addresses
        _start_loads(c, lane, target, box.box_bytes, unit, places, read, barrier, multicast, instruction)


def _start_loads(
    c: LaneContext,
    lane: int,
    target: tuple[int, int],
    size: int,
    unit: int,
    places: npt.NDArray[np.int64],
    read: Callable[[], UnitArray],
    barrier: Any,
    multicast: Any,
    instruction: int,
) -> None:
    """Starts a bulk copy of `size` bytes to an address in each CTA that receives it.  `target` is the CTA's index and
    the address.

    The copies run later.  They call `read` once, which returns the data in units of `unit` bytes, for the addresses
    `places`.  Last, an mbarrier of the same CTA counts the copied bytes."""
    group, observer, read = c.group, c.group.run.observer, cache(read)
    barrier_slot, barrier_offset = _place_of(c, barrier, lane)
    cta_mask = None if multicast is None else value_of(multicast, lane)
    for slot in _destinations(group, target[0], barrier_slot, cta_mask, instruction):
        base = slot * group.shared_size
        start, mbarrier = base + target[1], base + barrier_offset
        race_record = None if observer is None else observer.load_begins(c, lane, start, size, mbarrier, instruction)
        if group.run.checks.asynchronous:
            group.shared[start : start + size] = POISON
        if group.written is not None:
            group.written[start : start + size] = True
        index = (places + base) >> SHIFT[unit]
        run = partial(_end_load, group, unit, index, read, race_record, mbarrier, size, instruction)
        waiting_of(group).transfers.start(Transfer(run, instruction))


def _end_load(
    group: CtaGroup,
    unit: int,
    index: npt.NDArray[np.int64],
    read: Callable[[], UnitArray],
    record: Any,
    mbarrier: int,
    size: int,
    instruction: int,
) -> None:
    group.views[unit][index] = read()
    if record is not None and group.races is not None:
        group.races.signal_async(record, mbarrier)
    waiting_of(group).mbarriers.complete_bytes(mbarrier, size, instruction)


def _check_room(group: CtaGroup, shared: int, size: int, instruction: int) -> None:
    """Raises `Fault` if `size` bytes at address `shared` extend past the CTA's shared memory."""
    if shared + size > group.run.shared_limit:
        text = f"a box of {size} bytes at shared address 0x{shared:x} ends outside the CTA's memory"
        raise Fault(text, instruction, rule="out-of-bounds")


def _gathered(c: LaneContext, tensor: tensor_map.TensorMap, tile: TileIndex, lane: int, instruction: int) -> UnitArray:
    unit_bytes = tile.unit_bytes
    addresses = tile.global_addresses.astype(np.uint64)
    if tile.inside is None:
        data = tensor_maps.load_bytes(c, addresses, unit_bytes, instruction, lane=lane)
    else:
        data = np.empty(len(addresses), UNIT_DTYPES[unit_bytes])
        data[:] = tensor_map.fill_unit(tensor, unit_bytes).view(UNIT_DTYPES[unit_bytes])[0]
        if tile.inside.any():
            data[tile.inside] = tensor_maps.load_bytes(c, addresses[tile.inside], unit_bytes, instruction, lane=lane)
    if tensor.element.startswith("tf32") or tensor.element.endswith(".ftz"):
        element_words = np.ascontiguousarray(data).view(f"u{tensor.element_bytes}")
        data = tensor_map.loaded(element_words, tensor.element).view(UNIT_DTYPES[unit_bytes])
    return np.asarray(data)


def tensor_store(
    c: LaneContext,
    tensor: Any,
    coordinates: tuple[Any, ...],
    shared: Any,
    operation: str | None,
    guard: Any,
    instruction: int,
) -> None:
    """Runs `cp.async.bulk.tensor` and `cp.reduce.async.bulk.tensor` from shared to global memory."""
    for lane in map(int, c.lanes_under(guard)):
        box, tile, (cta_slot, offset) = _box(c, lane, tensor, coordinates, shared, instruction)
        base = cta_slot * c.group.shared_size
        _start_store(c, lane, base + offset, box.box_bytes, tile, base, box.element, operation, instruction)


def _start_store(
    c: LaneContext,
    lane: int,
    start: int,
    size: int,
    tile: TileIndex,
    base: int,
    element: str,
    operation: str | None,
    instruction: int,
) -> None:
    cta_group, unit, element_bytes = c.group, tile.unit_bytes, tensor_map.ELEMENT_BYTES[element]
    if operation is not None and element not in tensor_map.REDUCIBLE_TYPES[operation]:
        raise Fault(f"a reduction that there is not: {operation} of {element}", instruction)
    race_record = None
    if cta_group.run.observer is not None:
        race_record = cta_group.run.observer.store_begins(c, lane, start, size, instruction)
    addresses, shared_addresses = tile.global_addresses.astype(np.uint64), tile.shared_addresses + base
    if tile.inside is not None:
        addresses, shared_addresses = addresses[tile.inside], shared_addresses[tile.inside]
    if cta_group.written is not None and len(shared_addresses):
        check_written(c, shared_addresses, unit, instruction)

    read_data = cache(lambda: cta_group.views[unit].take(shared_addresses >> SHIFT[unit]))

    def run() -> None:
        data = read_data()
        if len(addresses):
            if operation is not None:
                if len(np.unique(addresses)) < len(addresses):
                    raise Fault("a reduction into a tensor whose elements overlap, which is not emulated", instruction)
                old_units = tensor_maps.load_bytes(c, addresses, unit, instruction, lane=lane, reduces=True)
                letter = {"u": "u", "s": "i"}.get(element[0], "u" if element in ("f16", "bf16") else "f")
                old, new = (units.view(f"{letter}{element_bytes}") for units in (old_units, data))
                if operation == "add" and element in FLOATS:
                    element_offsets = np.arange(0, unit, element_bytes, dtype=np.uint64)
                    places = (addresses[:, None] + element_offsets).ravel()
                    lanes = np.full(len(places), lane)
                    record_sum(c, "global", places, lanes, (old, new), element, instruction)
                new_units = np.ascontiguousarray(combined(operation, element, old, [new]))
                if element.endswith(".ftz"):
                    new_units = tensor_map.loaded(new_units.view(np.uint32), element)
                data = new_units.view(UNIT_DTYPES[unit])
            tensor_maps.store_bytes(c, addresses, data, unit, instruction, lane=lane, reduces=operation is not None)

    waiting_of(cta_group).transfers.start(Transfer(run, instruction, read_data, mark=race_record), int(c.lanes[lane]))


def _check_aligned(size: int, target: int, source: int, instruction: int) -> None:
    if size % 16 or target % 16 or source % 16:
        text = "cp.async.bulk wants addresses and a size that are multiples of 16 bytes"
        raise Fault(text, instruction, rule="misaligned")


def bulk_load(
    c: LaneContext,
    shared: Any,
    source: Any,
    size: Any,
    barrier: Any,
    multicast: Any,
    guard: Any,
    instruction: int,
    from_shared: bool,
) -> None:
    """Runs `cp.async.bulk` into shared memory: from global memory, or from shared memory of the cluster."""
    for lane in map(int, c.lanes_under(guard)):
        n_bytes, target = value_of(size, lane), _place_of(c, shared, lane)
        _check_aligned(n_bytes, target[1], value_of(source, lane), instruction)
        if not n_bytes:
            continue
        _check_room(c.group, target[1], n_bytes, instruction)
        places = np.arange(0, n_bytes, 16)
        if from_shared:
            read = _shared_reader(c, _place_of(c, source, lane), n_bytes, instruction)
        else:
            addresses = places.astype(np.uint64) + np.uint64(value_of(source, lane))
            read = partial(tensor_maps.load_bytes, c, addresses, 16, instruction, lane=lane)
        _start_loads(c, lane, target, n_bytes, 16, places + target[1], read, barrier, multicast, instruction)


def _shared_reader(c: LaneContext, source: tuple[int, int], size: int, instruction: int) -> Callable[[], UnitArray]:
    _check_room(c.group, source[1], size, instruction)
    offsets = np.arange(0, size, 16) + source[0] * c.group.shared_size + source[1]
    if c.group.written is not None:
        check_written(c, offsets, 16, instruction)
    return lambda: c.group.views[16].take(offsets >> 4)


def bulk_store(
    c: LaneContext, target: Any, shared: Any, size: Any, operation: str | None, kind: str, guard: Any, instruction: int
) -> None:
    """Runs `cp.async.bulk` and `cp.reduce.async.bulk` from shared to global memory."""
    cta_group = c.group
    for lane in map(int, c.lanes_under(guard)):
        n_bytes, (cta_slot, source_offset) = value_of(size, lane), _place_of(c, shared, lane)
        _check_aligned(n_bytes, source_offset, value_of(target, lane), instruction)
        if not n_bytes:
            continue
        _check_room(cta_group, source_offset, n_bytes, instruction)
        source_start = cta_slot * cta_group.shared_size + source_offset
        addresses = np.arange(0, n_bytes, 16, dtype=np.uint64) + np.uint64(value_of(target, lane))
        element_type = {"b": "u"}.get(kind[:1], kind[:1]) + kind[1:] if kind else "u8"
        copy_tile = TileIndex(addresses.view(np.int64), np.arange(source_start, source_start + n_bytes, 16), None, 16)
        _start_store(c, lane, source_start, n_bytes, copy_tile, 0, element_type, operation, instruction)


def commit_bulk(c: LaneContext, guard: Any) -> None:
    """Runs `cp.async.bulk.commit_group`."""
    waiting_of(c.group).transfers.commit_bulk(c.lanes[c.lanes_under(guard)])


def wait_bulk(c: LaneContext, newest: int, only_reads: bool, guard: Any) -> None:
    """Runs `cp.async.bulk.wait_group`."""
    bulk_copies = waiting_of(c.group).transfers.wait_bulk(c.lanes[c.lanes_under(guard)], newest, only_reads=only_reads)
    for bulk_copy in bulk_copies:
        if bulk_copy.mark is not None and c.group.races is not None:
            # Only the thread that issued the copy has waited for it.
            slot, warp = divmod(bulk_copy.lane // 32, c.group.race_warps)
            c.group.races.acquire_async(slot, warp, bulk_copy.mark)


def store_remote(
    c: LaneContext, addresses: Any, values: access.Values, width: int, barrier: Any, guard: Any, instruction: int
) -> None:
    """Runs `st.async`, a store that reports its bytes to an mbarrier.  The emulator does the store immediately."""
    launch, mbarriers = c.group.run, waiting_of(c.group).mbarriers
    barriers = mbarriers.lots(c, barrier, guard, instruction)
    lane_bytes = width * len(values)
    _watch(c, addresses, lane_bytes, [barrier_offset for barrier_offset, _ in barriers], guard, instruction)
    observer, launch.observer = launch.observer, None
    try:
        access.store(c, "shared", addresses, values, guard, width, instruction)
    finally:
        launch.observer = observer
    for barrier_offset, lanes in barriers:
        mbarriers.complete_bytes(barrier_offset, len(lanes) * lane_bytes, instruction)
    waiting_of(c.group).wake_mbarriers()


def _watch(c: LaneContext, addresses: Any, size: int, places: list[int], guard: Any, instruction: int) -> None:
    """Reports asynchronous stores to the race detector. All stores into the shared memory of one CTA count as one
    copy."""
    cta_group = c.group
    lanes = c.lanes_under(guard)
    if cta_group.races is None or not len(lanes):
        return
    lane_addresses = c.vector(addresses)
    byte_offsets = np.asarray(shared_offsets(c, lane_addresses[lanes], size, lanes, instruction)).astype(np.int64)
    warps = np.unique(c.warps[lanes] % cta_group.race_warps)
    for cta_slot in np.unique(byte_offsets // cta_group.shared_size):
        slot_offsets = byte_offsets[byte_offsets // cta_group.shared_size == cta_slot]
        race_record = cta_group.races.begin_async(int(slot_offsets[0]) // cta_group.race_bytes, warps, TMA_LOAD)
        cta_group.races.async_write(race_record, slot_offsets, size, instruction)
        for barrier_offset in places:
            if barrier_offset // cta_group.shared_size == cta_slot:
                cta_group.races.signal_async(race_record, barrier_offset)

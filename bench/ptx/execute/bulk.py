"""Runs bulk copies and TMA (PTX ISA 8.7, sections 9.7.9.25.4 and 5, 9.7.9.27)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.execute import raw
from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import POISON, RANK_SHIFT, Group
from rooflab.bench.ptx.machine.memory import WIDE
from rooflab.bench.ptx.machine.shared_access import check_written
from rooflab.bench.ptx.machine.transfers import Transfer
from rooflab.bench.ptx.tiles import tensor_map, tma_values
from rooflab.bench.ptx.tiles.tma_tiles import TileIndex, tile_index

_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
MAP_ALIGNMENT = 64
"""Bytes: a tensor map that a copy uses starts at a multiple of it (`alignas` of the driver's CUtensorMap)."""


def issuers(c: Context, guard: Any) -> Iterator[int]:
    """The lanes that issue, each a copy of its own."""
    lanes = range(c.size) if guard is None else map(int, np.flatnonzero(np.broadcast_to(guard, c.size)))
    yield from lanes


def value_of(value: Any, lane: int) -> int:
    """What one lane has."""
    return int(value) if isinstance(value, np.generic) else int(value[lane])


def _destinations(group: Group, slot: int, barrier_slot: int, multicast: int | None, instruction: int) -> list[int]:
    """Slots of the CTAs that receive a copy, each of which tells an mbarrier of its own."""
    if multicast is None:
        if barrier_slot != slot:
            raise Fault("the copy's destination and its mbarrier lie in different CTAs", instruction)
        return [slot]
    if multicast >> len(group.ctas):
        raise Fault(f"a multicast to 0x{multicast:x}, and the cluster has {len(group.ctas)} CTAs", instruction)
    return [rank for rank in range(len(group.ctas)) if multicast >> rank & 1]


def place_of(group: Group, slot: int, address: int) -> tuple[int, int]:
    """Slot and address within it of a shared::cluster address."""
    rank = address >> RANK_SHIFT
    return (rank - 1 if rank else slot), address & ((1 << RANK_SHIFT) - 1)


def _tensor(c: Context, address: int, lane: int, instruction: int) -> tensor_map.TensorMap:
    if address % MAP_ALIGNMENT:
        raise Fault(f"a tensor map at 0x{address:x}, not a multiple of {MAP_ALIGNMENT} bytes", instruction)
    try:
        return tensor_map.unpack(raw.read_map(c, address, lane, instruction))
    except ValueError as error:
        raise Fault(str(error), instruction) from None


def tensor_load(
    c: Context,
    shared: Any,
    tensor: Any,
    coordinates: tuple[Any, ...],
    barrier: Any,
    multicast: Any,
    guard: Any,
    instruction: int,
) -> None:
    """`cp.async.bulk.tensor` from global to shared memory."""
    group = c.group
    for lane in issuers(c, guard):
        own = int(c.slots[lane])
        found = _tensor(c, value_of(tensor, lane), lane, instruction)
        slot, inside = place_of(group, own, value_of(shared, lane))
        coords = [value_of(item, lane) for item in coordinates]
        bar_slot, bar = place_of(group, own, value_of(barrier, lane))
        mask = None if multicast is None else value_of(multicast, lane)
        tile = _tile(found, coords, inside, instruction)
        read = cache(partial(_gathered, c, found, tile, lane, instruction))  # once, whoever receives it
        for to in _destinations(group, slot, bar_slot, mask, instruction):
            _start_load(c, lane, to, inside, found, tile, read, to * group.shared_size + bar, instruction)


def _tile(tensor: tensor_map.TensorMap, coords: list[int], shared: int, instruction: int) -> TileIndex:
    try:
        return tile_index(tensor, coords, shared)
    except ValueError as error:
        raise Fault(str(error), instruction) from None


def _start_load(
    c: Context,
    lane: int,
    slot: int,
    shared: int,
    tensor: tensor_map.TensorMap,
    tile: TileIndex,
    read: Callable[[], npt.NDArray[Any]],
    barrier: int,
    instruction: int,
) -> None:
    group = c.group
    base = slot * group.shared_size
    check_room(group, shared, tensor.box_bytes, instruction)
    transfer = None
    if group.run.observer is not None:
        transfer = group.run.observer.load_begins(c, lane, base + shared, tensor.box_bytes, barrier, instruction)
    if group.run.checks.asynchronous:
        group.shared[base + shared : base + shared + tensor.box_bytes] = POISON
    if group.written is not None:
        group.written[base + shared : base + shared + tensor.box_bytes] = True

    def run() -> None:
        unit = tile.unit_bytes
        group.views[unit][(tile.shared_addresses + base) >> _SHIFT[unit]] = read()
        if transfer is not None and group.run.observer is not None:
            group.run.observer.load_ends(group, transfer, barrier)
        group.waiting.mbarriers.complete_bytes(barrier, tensor.box_bytes, instruction)

    group.waiting.transfers.start(Transfer(run, instruction))


def check_room(group: Group, shared: int, size: int, instruction: int) -> None:
    """Raises `Fault` where `size` bytes at an address of shared memory reach beyond it."""
    if shared + size > group.run.shared_limit:
        raise Fault(f"a box of {size} bytes at shared address 0x{shared:x} ends outside the CTA's memory", instruction)


def _gathered(
    c: Context, tensor: tensor_map.TensorMap, tile: TileIndex, lane: int, instruction: int
) -> npt.NDArray[Any]:
    unit = tile.unit_bytes
    addresses = tile.global_addresses.astype(np.uint64)
    if tile.inside is None:
        data = raw.load_bytes(c, addresses, unit, instruction, lane=lane)
    else:
        data = np.empty(len(addresses), WIDE[unit])
        data[:] = tma_values.fill_unit(tensor, unit).view(WIDE[unit])[0]
        if tile.inside.any():
            data[tile.inside] = raw.load_bytes(c, addresses[tile.inside], unit, instruction, lane=lane)
    if tensor.element.startswith("tf32") or tensor.element.endswith(".ftz"):
        words = np.ascontiguousarray(data).view(f"u{tensor.element_bytes}")
        data = tma_values.loaded(words, tensor.element).view(WIDE[unit])
    return np.asarray(data)


def tensor_store(
    c: Context,
    tensor: Any,
    coordinates: tuple[Any, ...],
    shared: Any,
    operation: str | None,
    guard: Any,
    instruction: int,
) -> None:
    """`cp.async.bulk.tensor` and `cp.reduce.async.bulk.tensor` from shared to global memory."""
    group = c.group
    for lane in issuers(c, guard):
        found = _tensor(c, value_of(tensor, lane), lane, instruction)
        slot, inside = place_of(group, int(c.slots[lane]), value_of(shared, lane))
        tile = _tile(found, [value_of(item, lane) for item in coordinates], inside, instruction)
        check_room(group, inside, found.box_bytes, instruction)
        base = slot * group.shared_size
        _start_store(c, lane, base + inside, tile, base, found, operation, instruction)


def _start_store(
    c: Context,
    lane: int,
    start: int,
    tile: TileIndex,
    base: int,
    tensor: tensor_map.TensorMap,
    operation: str | None,
    instruction: int,
) -> None:
    group, unit = c.group, tile.unit_bytes
    if operation is not None and tensor.element not in tma_values.REDUCIBLE[operation]:
        raise Fault(f"a reduction that there is not: {operation} of {tensor.element}", instruction)
    mark = None
    if group.run.observer is not None:
        mark = group.run.observer.store_begins(c, lane, start, tensor.box_bytes, instruction)
    addresses, places = tile.global_addresses.astype(np.uint64), tile.shared_addresses + base
    if tile.inside is not None:
        addresses, places = addresses[tile.inside], places[tile.inside]
    if group.written is not None and len(places):
        check_written(c, places, unit, instruction)

    read = cache(lambda: group.views[unit].take(places >> _SHIFT[unit]))

    def run() -> None:
        data = read()
        if len(addresses):
            if operation is not None:
                if len(np.unique(addresses)) < len(addresses):
                    raise Fault("a reduction into a tensor whose elements overlap, which is not emulated", instruction)
                old = raw.load_bytes(c, addresses, unit, instruction, lane=lane, reduces=True)
                words = f"u{tensor.element_bytes}"
                new = tma_values.reduce_values(operation, old.view(words), data.view(words), tensor.element)
                data = np.ascontiguousarray(new).view(WIDE[unit])
            raw.store_bytes(c, addresses, data, unit, instruction, lane=lane, reduces=operation is not None)

    group.waiting.transfers.start(Transfer(run, instruction, read, mark=mark), int(c.lanes[lane]))


def bulk_load(
    c: Context, shared: Any, source: Any, size: Any, barrier: Any, multicast: Any, guard: Any, instruction: int
) -> None:
    """`cp.async.bulk` from global to shared memory."""
    group = c.group
    for lane in issuers(c, guard):
        own, count = int(c.slots[lane]), value_of(size, lane)
        slot, inside = place_of(group, own, value_of(shared, lane))
        if count % 16 or inside % 16 or value_of(source, lane) % 16:
            raise Fault("cp.async.bulk wants addresses and a size that are multiples of 16 bytes", instruction)
        if not count:
            continue
        check_room(group, inside, count, instruction)
        bar_slot, bar = place_of(group, own, value_of(barrier, lane))
        mask = None if multicast is None else value_of(multicast, lane)
        addresses = np.arange(0, count, 16, dtype=np.uint64) + np.uint64(value_of(source, lane))
        read = cache(partial(raw.load_bytes, c, addresses, 16, instruction, lane=lane))
        for to in _destinations(group, slot, bar_slot, mask, instruction):
            start_bulk(c, lane, to * group.shared_size + inside, read, count, to * group.shared_size + bar, instruction)


def start_bulk(
    c: Context, lane: int, start: int, read: Callable[[], npt.NDArray[Any]], size: int, barrier: int, instruction: int
) -> None:
    """Starts a copy of `size` bytes to the place `start` of the group's shared memory.

    `read` gives them, in units of 16 bytes, when the copy is carried out; then it tells the mbarrier at `barrier`.
    """
    group = c.group
    observer = group.run.observer
    transfer = None if observer is None else observer.load_begins(c, lane, start, size, barrier, instruction)
    if group.run.checks.asynchronous:
        group.shared[start : start + size] = POISON
    if group.written is not None:
        group.written[start : start + size] = True

    def run() -> None:
        group.views[16][start >> 4 : (start + size) >> 4] = read()
        if transfer is not None and group.run.observer is not None:
            group.run.observer.load_ends(group, transfer, barrier)
        group.waiting.mbarriers.complete_bytes(barrier, size, instruction)

    group.waiting.transfers.start(Transfer(run, instruction))


def bulk_store(
    c: Context, target: Any, shared: Any, size: Any, operation: str | None, kind: str, guard: Any, instruction: int
) -> None:
    """`cp.async.bulk` and `cp.reduce.async.bulk` from shared to global memory."""
    group = c.group
    for lane in issuers(c, guard):
        count, (slot, inside) = value_of(size, lane), place_of(group, int(c.slots[lane]), value_of(shared, lane))
        if count % 16 or inside % 16 or value_of(target, lane) % 16:
            raise Fault("cp.async.bulk wants addresses and a size that are multiples of 16 bytes", instruction)
        if not count:
            continue
        check_room(group, inside, count, instruction)
        start = slot * group.shared_size + inside
        addresses = np.arange(0, count, 16, dtype=np.uint64) + np.uint64(value_of(target, lane))
        element = {"b": "u"}.get(kind[:1], kind[:1]) + kind[1:] if kind else "u8"
        tile = TileIndex(addresses.view(np.int64), np.arange(start, start + count, 16), None, 16)
        flat = _Flat(element, count)
        _start_store(c, lane, start, tile, 0, flat, operation, instruction)  # type: ignore[arg-type]


class _Flat:
    """What a store asks of a tensor map, for a copy that has none."""

    def __init__(self, element: str, size: int):
        self.element = element
        self.box_bytes = size
        self.element_bytes = tensor_map.ELEMENT_BYTES[element]


def commit_bulk(c: Context, guard: Any, instruction: int) -> None:
    """`cp.async.bulk.commit_group`."""
    lanes = c.lanes if guard is None else c.lanes[np.broadcast_to(guard, c.size)]
    c.group.waiting.transfers.commit_bulk(lanes)


def wait_bulk(c: Context, newest: int, only_reads: bool, guard: Any, instruction: int) -> None:
    """`cp.async.bulk.wait_group`."""
    lanes = c.lanes if guard is None else c.lanes[np.broadcast_to(guard, c.size)]
    done = c.group.waiting.transfers.wait_bulk(lanes, newest, only_reads=only_reads)
    if done and c.group.run.observer is not None:
        c.group.run.observer.stores_done(c, lanes, done)

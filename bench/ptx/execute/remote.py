"""Runs copies and stores from one CTA's shared memory into another's (PTX ISA 8.7, sections 9.7.9.12, 25.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.execute.bulk import check_room, issuers, place_of, start_bulk, value_of
from rooflab.bench.ptx.machine import access
from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.shared_access import check_written, shared_offsets
from rooflab.bench.ptx.races.vector_clocks import LOAD


def copy(c: Context, target: Any, source: Any, size: Any, barrier: Any, guard: Any, instruction: int) -> None:
    """`cp.async.bulk.shared::cluster.shared::cta`."""
    group = c.group
    for lane in issuers(c, guard):
        own, count = int(c.slots[lane]), value_of(size, lane)
        to, inside = place_of(group, own, value_of(target, lane))
        slot, start = place_of(group, own, value_of(source, lane))
        if count % 16 or inside % 16 or start % 16:
            raise Fault("cp.async.bulk wants addresses and a size that are multiples of 16 bytes", instruction)
        check_room(group, inside, count, instruction)
        check_room(group, start, count, instruction)
        first = slot * group.shared_size + start
        if group.written is not None:
            check_written(c, np.arange(first, first + count, 16), 16, instruction)
        bar_slot, bar = place_of(group, own, value_of(barrier, lane))

        def read(first: int = first, count: int = count) -> npt.NDArray[Any]:
            return group.views[16][first >> 4 : (first + count) >> 4].copy()

        place = bar_slot * group.shared_size + bar
        start_bulk(c, lane, to * group.shared_size + inside, read, count, place, instruction)


def store(
    c: Context, addresses: Any, values: access.Values, width: int, barrier: Any, guard: Any, instruction: int
) -> None:
    """`st.async`: a store that tells an mbarrier of its bytes; it is carried out at once."""
    run, mbarriers = c.group.run, c.group.waiting.mbarriers
    places = mbarriers.places(c, barrier, guard, instruction)
    size = width * len(values)
    _watch(c, addresses, size, [place for place, _ in places], guard, instruction)
    observer, run.observer = run.observer, None
    try:
        access.store(c, "shared", addresses, values, guard, width, instruction)
    finally:
        run.observer = observer
    for place, lanes in places:
        mbarriers.complete_bytes(place, lanes * size, instruction)
    c.group.waiting.wake_mbarriers()


def _watch(c: Context, addresses: Any, size: int, places: list[int], guard: Any, instruction: int) -> None:
    """Tells the race detector, to which the stores into one CTA's memory are one copy that nobody else sees to."""
    group = c.group
    lanes = np.arange(c.size) if guard is None else np.flatnonzero(np.broadcast_to(guard, c.size))
    if group.races is None or not len(lanes):
        return
    where = np.full(c.size, addresses) if isinstance(addresses, np.generic) else addresses
    offsets = np.asarray(shared_offsets(c, where[lanes], size, lanes, instruction)).astype(np.int64)
    warps = np.unique(c.warps[lanes] % group.race_warps)
    for slot in np.unique(offsets // group.shared_size):
        own = offsets[offsets // group.shared_size == slot]
        transfer = group.races.begin_async(int(own[0]) // group.race_bytes, warps, LOAD)
        group.races.async_write(transfer, own, size, instruction)
        for place in places:
            if place // group.shared_size == slot:
                group.races.signal_async(transfer, place)

"""Runs `cp.async`: each lane copies 4 to 16 bytes (PTX ISA 8.7, section 9.7.9.25.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.access import WRITTEN_UNITS, shared_offsets
from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.global_memory import lane_of, load_located
from rooflab.bench.emulator.machine.memory import POISON, SHIFT, UNIT_DTYPES
from rooflab.bench.emulator.machine.run import Fault
from rooflab.bench.emulator.machine.transfers import Copies, Transfer
from rooflab.bench.emulator.machine.waiting import waiting_of

_POISON_BY_SIZE = {size: np.full(size, POISON, np.uint8).view(kind)[0] for size, kind in UNIT_DTYPES.items()}


def copy(c: LaneContext, targets: Any, sources: Any, size: int, taken: Any, guard: Any, instruction: int) -> None:
    """Runs `cp.async`.  Each lane writes `size` bytes: first `taken` bytes from global memory, then zeros."""
    if size not in (4, 8, 16):
        raise Fault(f"cp.async copies 4, 8 or 16 bytes, got {size}", instruction)
    lanes = c.lanes_under(guard)
    if not len(lanes):
        return
    target_addresses = c.vector(targets)[lanes]
    source = c.vector(sources)[lanes]
    byte_counts = np.full(len(lanes), size) if taken is None else c.vector(taken)[lanes].astype(np.int64)
    target_offsets = np.asarray(shared_offsets(c, target_addresses, size, lanes, instruction)).astype(np.int64)
    if taken is not None:
        _check_pieces(c, source, byte_counts, size, lanes, instruction)
    cta_group = c.group
    if cta_group.run.observer is not None:
        cta_group.run.observer.copy_async(c, lanes, target_offsets, size, instruction)
    if cta_group.run.checks.asynchronous:
        cta_group.views[size][target_offsets >> SHIFT[size]] = _POISON_BY_SIZE[size]
    if cta_group.written is not None:
        cta_group.written.view(UNIT_DTYPES[size])[target_offsets >> SHIFT[size]] = WRITTEN_UNITS[size]
    unit_indices = target_offsets >> SHIFT[size]

    def run(mask: npt.NDArray[np.bool_] | None) -> None:
        lane_index = slice(None) if mask is None else mask
        values = _read_some(c, source[lane_index], byte_counts[lane_index], size, lanes[lane_index], instruction)
        cta_group.views[size][unit_indices[lane_index]] = values

    waiting_of(cta_group).transfers.copy(Copies(c.lanes[lanes], 0, run))


def _check_pieces(
    c: LaneContext,
    sources: npt.NDArray[Any],
    counts: npt.NDArray[Any],
    size: int,
    lanes: npt.NDArray[np.intp],
    instruction: int,
) -> None:
    """Checks the reads of a `cp.async`. Raises `Fault` if a lane reads more than `size` bytes, or if its address is not
    a multiple of `size`."""
    if (max_bytes := int(counts.max())) > size:
        fault_text = f"cp.async takes at most its {size} bytes from memory, and here are {max_bytes}"
        raise Fault(fault_text, instruction, lane_of(c, counts, max_bytes, lanes))
    misaligned_sources = sources[(counts > 0) & (sources & np.uint64(size - 1) != 0)]
    if len(misaligned_sources):
        fault_text = f"address 0x{int(misaligned_sources[0]):x} is not a multiple of {size} bytes"
        raise Fault(fault_text, instruction, lane_of(c, sources, misaligned_sources[0], lanes), "misaligned")


def _read_some(
    c: LaneContext,
    sources: npt.NDArray[Any],
    counts: npt.NDArray[Any],
    size: int,
    lanes: npt.NDArray[np.intp],
    instruction: int,
) -> npt.NDArray[Any]:
    is_full_copy = counts == size
    if is_full_copy.all():
        return np.asarray(load_located(c, sources, size, lanes, instruction, copy=True))
    values = np.zeros(len(sources), UNIT_DTYPES[size])
    if is_full_copy.any():
        values[is_full_copy] = load_located(c, sources[is_full_copy], size, lanes[is_full_copy], instruction, copy=True)
    for index in np.flatnonzero(~is_full_copy & (counts > 0)):
        # This goes byte by byte, because a part of a copy may have any length.
        byte_count = int(counts[index])
        unit_bytes = np.zeros(size, np.uint8)
        addresses = sources[index] + np.arange(byte_count, dtype=np.uint64)
        unit_bytes[:byte_count] = load_located(c, addresses, 1, lanes[index].repeat(byte_count), instruction, copy=True)
        values[index] = unit_bytes.view(UNIT_DTYPES[size])[0]
    return values


def commit(c: LaneContext) -> None:
    """Runs `cp.async.commit_group`."""
    waiting_of(c.group).transfers.commit(c)
    if c.group.run.observer is not None:
        c.group.run.observer.commit_copies(c)


def wait(c: LaneContext, newest: int | None) -> None:
    """Runs `cp.async.wait_group` and `cp.async.wait_all`."""
    waiting_of(c.group).transfers.wait(c, newest)
    if c.group.run.observer is not None:
        c.group.run.observer.wait_copies(c, newest)


def arrive_after(c: LaneContext, addresses: Any, counted: bool, guard: Any, instruction: int) -> None:
    """Runs `cp.async.mbarrier.arrive`: the lanes arrive at an mbarrier when their earlier `cp.async` are complete."""
    mbarriers = waiting_of(c.group).mbarriers
    for place, lanes in mbarriers.lots(c, addresses, guard, instruction):
        if not counted:
            # Without .noinc the arrival is added to the arrivals that the mbarrier was initialised for.
            mbarriers.more_pending(place, len(lanes), instruction)
        if c.group.run.observer is not None:
            c.group.run.observer.signal_copies(c, lanes, place, instruction)

        def run(place: int = place, threads: npt.NDArray[np.int64] = c.lanes[lanes]) -> None:
            waiting_of(c.group).transfers.finish_copies(threads)
            mbarriers.arrived(place, len(threads), instruction)

        waiting_of(c.group).transfers.start(Transfer(run, instruction))

"""Runs `cp.async`: copies of 4 to 16 bytes that each lane asks for (PTX ISA 8.7, section 9.7.9.25.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine.access import load_located
from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import POISON
from rooflab.bench.ptx.machine.memory import WIDE
from rooflab.bench.ptx.machine.shared_access import lane_of, shared_offsets
from rooflab.bench.ptx.machine.transfers import Copies, Transfer

_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


def copy(c: Context, targets: Any, sources: Any, size: int, taken: Any, guard: Any, instruction: int) -> None:
    """`cp.async`: `size` bytes for each lane, of which the first `taken` come from memory and the rest are zero."""
    if size not in (4, 8, 16):
        raise Fault(f"cp.async copies 4, 8 or 16 bytes, got {size}", instruction)
    lanes = np.arange(c.size) if guard is None else np.flatnonzero(np.broadcast_to(guard, c.size))
    if not len(lanes):
        return
    where = _vector(targets, c.size)[lanes]
    source = _vector(sources, c.size)[lanes]
    wanted = np.full(len(lanes), size) if taken is None else _vector(taken, c.size)[lanes].astype(np.int64)
    offsets = np.asarray(shared_offsets(c, where, size, lanes, instruction)).astype(np.int64)
    if taken is not None:
        _check_pieces(c, source, wanted, size, lanes, instruction)
    group = c.group
    if group.run.observer is not None:
        group.run.observer.copy_async(c, lanes, offsets, size, instruction)
    if group.run.checks.asynchronous:
        group.views[size][offsets >> _SHIFT[size]] = _POISON[size]
    if group.written is not None:
        group.written.view(WIDE[size])[offsets >> _SHIFT[size]] = _WRITTEN[size]
    index = offsets >> _SHIFT[size]

    def run(mask: npt.NDArray[np.bool_] | None) -> None:
        chosen = slice(None) if mask is None else mask
        found = _read_some(c, source[chosen], wanted[chosen], size, lanes[chosen], instruction)
        group.views[size][index[chosen]] = found

    group.waiting.transfers.copy(Copies(c.lanes[lanes], 0, run))


_POISON = {size: np.full(size, POISON, np.uint8).view(kind)[0] for size, kind in WIDE.items()}
_WRITTEN = {size: np.ones(size, np.bool_).view(kind)[0] for size, kind in WIDE.items()}


def _vector(value: Any, size: int) -> npt.NDArray[Any]:
    return np.full(size, value) if isinstance(value, np.generic) else value


def _check_pieces(
    c: Context,
    sources: npt.NDArray[Any],
    wanted: npt.NDArray[Any],
    size: int,
    lanes: npt.NDArray[np.intp],
    instruction: int,
) -> None:
    """Raises `Fault` on a source's size above the copy's, and on an address that a whole copy could not have."""
    if (most := int(wanted.max())) > size:
        text = f"cp.async takes at most its {size} bytes from memory, and here are {most}"
        raise Fault(text, instruction, lane_of(c, wanted, most, lanes))
    bad = sources[(wanted > 0) & (sources & np.uint64(size - 1) != 0)]
    if len(bad):
        text = f"address 0x{int(bad[0]):x} is not a multiple of {size} bytes"
        raise Fault(text, instruction, lane_of(c, sources, bad[0], lanes))


def _read_some(
    c: Context,
    sources: npt.NDArray[Any],
    wanted: npt.NDArray[Any],
    size: int,
    lanes: npt.NDArray[np.intp],
    instruction: int,
) -> npt.NDArray[Any]:
    whole = wanted == size
    if whole.all():
        return np.asarray(load_located(c, sources, size, lanes, instruction, copy=True))
    found = np.zeros(len(sources), WIDE[size])
    if whole.any():
        found[whole] = load_located(c, sources[whole], size, lanes[whole], instruction, copy=True)
    for place in np.flatnonzero(~whole & (wanted > 0)):
        # A piece of a copy: byte by byte, because it ends where it likes.
        count = int(wanted[place])
        piece = np.zeros(size, np.uint8)
        addresses = sources[place] + np.arange(count, dtype=np.uint64)
        piece[:count] = load_located(c, addresses, 1, lanes[place].repeat(count), instruction, copy=True)
        found[place] = piece.view(WIDE[size])[0]
    return found


def commit(c: Context, instruction: int) -> None:
    """`cp.async.commit_group`."""
    c.group.waiting.transfers.commit(c)
    if c.group.run.observer is not None:
        c.group.run.observer.commit_copies(c)


def wait(c: Context, newest: int | None, instruction: int) -> None:
    """`cp.async.wait_group`, `cp.async.wait_all`."""
    c.group.waiting.transfers.wait(c, newest)
    if c.group.run.observer is not None:
        c.group.run.observer.wait_copies(c, newest)


def arrive_after(c: Context, addresses: Any, counted: bool, guard: Any, instruction: int) -> None:
    """`cp.async.mbarrier.arrive`: the lanes' copies so far arrive at an mbarrier when they are done."""
    mbarriers = c.group.waiting.mbarriers
    for place, lanes in mbarriers.lots(c, addresses, guard, instruction):
        if not counted:
            # Without .noinc the arrival is not one of those that the mbarrier counts.
            mbarriers.more_pending(place, len(lanes), instruction)
        if c.group.run.observer is not None:
            c.group.run.observer.signal_copies(c, lanes, place)

        def run(place: int = place, own: npt.NDArray[np.int64] = c.lanes[lanes]) -> None:
            c.group.waiting.transfers.finish_copies(own)
            mbarriers.async_arrive(place, len(own), instruction)

        c.group.waiting.transfers.start(Transfer(run, instruction))

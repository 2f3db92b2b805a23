"""Loads and stores of shared memory, a CTA's own and its cluster's (PTX ISA 8.7, section 5.1.6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import RANK_SHIFT
from rooflab.bench.ptx.machine.memory import SHIFT, WIDE, assign


def shared_offsets(c: Context, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    """Places in the group's shared memory.  Raises `Fault` on what lies outside the CTA's own, or is not aligned."""
    limit = c.group.run.shared_limit - size
    scalar = isinstance(addresses, np.generic)
    top = int(addresses) if scalar else int(addresses.max())
    bits = top if scalar else int(np.bitwise_or.reduce(addresses))
    if bits & (size - 1):
        bad = top if scalar else int(addresses[(addresses & (size - 1)) != 0][0])
        lane = lane_of(c, addresses, bad, active)
        raise Fault(f"shared address 0x{bad:x} is not a multiple of {size} bytes", instruction, lane)
    base = c.shared_base
    if top > limit:
        if 1 <= top >> RANK_SHIFT <= len(c.group.ctas) and _reaches_cluster(c, instruction):
            return _cluster_offsets(c, addresses, limit, active, instruction)
        text = f"{size} bytes at shared address 0x{top:x} lie outside the {c.group.run.shared_limit} there"
        raise Fault(text, instruction, lane_of(c, addresses, top, active))
    if isinstance(base, int):
        return addresses if not base else addresses + np.int64(base)
    base = base if active is None else base[active]
    return base + addresses


def lane_of(c: Context, addresses: Any, wanted: int, active: Any) -> int:
    """The first lane (of `active`, None for all) whose address is `wanted`, counted through the group."""
    place = 0 if isinstance(addresses, np.generic) or not addresses.ndim else int((addresses == wanted).argmax())
    return int(c.lanes[place if active is None else active[place]])


def _reaches_cluster(c: Context, instruction: int) -> bool:
    """Whether an instruction may name another CTA's memory: `.shared` alone is the CTA's own."""
    opcode = c.group.program.kernel.instructions[instruction].opcode
    return "shared::cluster" in opcode or ".shared" not in opcode


def _cluster_offsets(c: Context, addresses: Any, limit: int, active: Any, instruction: int) -> Any:
    ranks = (np.asarray(addresses) >> RANK_SHIFT).astype(np.int64)
    inside = (np.asarray(addresses) & ((1 << RANK_SHIFT) - 1)).astype(np.int64)
    if int(inside.max()) > limit:
        raise Fault(
            f"shared::cluster address 0x{int(np.max(addresses)):x} lies outside the cluster's memory", instruction
        )
    own = c.slots if active is None else c.slots[active]
    slots = np.where(ranks > 0, ranks - 1, own if ranks.ndim else own[0])
    for slot in map(int, np.unique(slots)):
        first = slot * c.group.lanes_per_cta
        if not c.group.alive[first : first + c.group.lanes_per_cta].any():
            raise Fault(f"the shared memory of CTA {c.group.ctas[slot]}, which has ended", instruction)
    found = slots * c.group.shared_size + inside
    return found if found.ndim else np.int64(found)


def load_shared(c: Context, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    """Units of `size` bytes."""
    offsets = shared_offsets(c, addresses, size, active, instruction)
    group = c.group
    if group.run.observer is not None:
        group.run.observer.shared_read(c, active, offsets, size, instruction)
    if group.written is not None:
        check_written(c, offsets, size, instruction)
    index = offsets >> SHIFT[size]
    view = group.views[size]
    return view.take(index)


def check_written(c: Context, offsets: Any, size: int, instruction: int) -> None:
    """Raises `Fault` where shared memory is read that nobody has written."""
    written = c.group.written
    assert written is not None
    known = np.take(written.view(WIDE[size]), np.atleast_1d(offsets) >> SHIFT[size]).view(np.bool_)
    if not known.all():
        at = int(np.atleast_1d(offsets)[int(np.flatnonzero(~known)[0]) // size]) % c.group.shared_size
        raise Fault(f"a read of shared memory at 0x{at:x}, which nobody has written", instruction)


def store_shared(c: Context, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    """Stores units of `size` bytes."""
    offsets = shared_offsets(c, addresses, size, active, instruction)
    group = c.group
    if group.run.observer is not None:
        group.run.observer.shared_write(c, active, offsets, size, instruction, value)
    index = offsets >> SHIFT[size]
    if group.written is not None:
        np.put(group.written.view(WIDE[size]), index, WRITTEN[size])
    assign(group.views[size], index, value)


WRITTEN = {size: np.ones(size, np.bool_).view(WIDE[size])[0] for size in WIDE}
"""What says that all bytes of a unit are written."""

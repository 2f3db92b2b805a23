"""Loads and stores of the lanes' own memory, and of the kernel's parameters (PTX ISA 8.7, sections 5.1.5 and 6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import POISON
from rooflab.bench.ptx.machine.memory import SHIFT, WIDE
from rooflab.bench.ptx.machine.shared_access import WRITTEN, lane_of

INSIDE = (1 << 60) - 1
"""The bits of a generic address within its window."""


def _local_offsets(c: Context, addresses: Any, size: int, active: Any, instruction: int) -> npt.NDArray[np.int64]:
    group = c.group
    room = group.run.local_size
    if group.local is None:
        group.local = np.full(len(group.alive) * room, POISON, np.uint8)
        group.local_written = np.zeros(len(group.local), np.bool_) if group.run.checks.uninitialised else None
    inside = np.asarray(addresses).astype(np.int64) & INSIDE
    top = int(inside.max())
    if top > room - size:
        lane = lane_of(c, inside, top, active)
        raise Fault(f"{size} bytes at local address 0x{top:x} lie outside the {room} there", instruction, lane)
    _check_aligned(inside, size, "local", instruction)
    lanes = c.lanes if active is None else c.lanes[active]
    return lanes * room + inside


def _check_aligned(inside: Any, size: int, space: str, instruction: int) -> None:
    if int(np.bitwise_or.reduce(inside, axis=None)) & (size - 1):
        bad = int(np.atleast_1d(inside)[np.atleast_1d(inside) & (size - 1) != 0][0])
        raise Fault(f"{space} address 0x{bad:x} is not a multiple of {size} bytes", instruction)


def load_local(c: Context, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    """Units of `size` bytes of the lanes' own memory.  Raises `Fault` on what its thread has not written."""
    offsets = _local_offsets(c, addresses, size, active, instruction)
    assert c.group.local is not None
    index, written = offsets >> SHIFT[size], c.group.local_written
    # What a call returns (`ld.param`) is written by the function, which is left out.
    if written is not None and ".param" not in c.group.program.kernel.instructions[instruction].opcode:
        known = written.view(WIDE[size]).take(index).view(np.bool_)
        if not known.all():
            place = int(np.flatnonzero(~known)[0]) // size
            lane = int((c.lanes if active is None else c.lanes[active])[place])
            at = int(offsets[place]) % c.group.run.local_size
            raise Fault(f"a read of local memory at 0x{at:x}, which the thread has not written", instruction, lane)
    return c.group.local.view(WIDE[size]).take(index)


def store_local(c: Context, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    """Stores units of `size` bytes."""
    offsets = _local_offsets(c, addresses, size, active, instruction)
    assert c.group.local is not None
    c.group.local.view(WIDE[size])[offsets >> SHIFT[size]] = value
    if c.group.local_written is not None:
        c.group.local_written.view(WIDE[size])[offsets >> SHIFT[size]] = WRITTEN[size]


def load_param(c: Context, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    """Units of `size` bytes of the kernel's parameters."""
    data = c.group.run.parameter_bytes
    inside = np.asarray(addresses).astype(np.int64) & INSIDE
    if int(inside.max()) > len(data) - size:
        raise Fault(f"{size} bytes at parameter address 0x{int(inside.max()):x} lie behind the last", instruction)
    _check_aligned(inside, size, "parameter", instruction)
    found = data.view(WIDE[size])[inside >> SHIFT[size]]
    return found if isinstance(found, np.ndarray) and found.ndim else found[()]


def store_param(c: Context, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    """Raises `Fault`: parameters are constant."""
    raise Fault("a store to a kernel's parameter", instruction)

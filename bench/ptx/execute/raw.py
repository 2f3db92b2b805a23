"""Bytes that copies move, outside the lanes' own loads and stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine.access import load_located, store_located
from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import PARAM_WINDOW, SHARED_WINDOW
from rooflab.bench.ptx.tiles import tensor_map


def load_bytes(
    c: Context, addresses: Any, size: int, instruction: int, *, lane: int = 0, reduces: bool = False
) -> npt.NDArray[Any]:
    """Units of `size` bytes at addresses of global memory, read by a copy that `lane` issued."""
    lanes = np.full(np.size(addresses), lane)
    return np.asarray(load_located(c, addresses, size, lanes, instruction, copy=True, reduces=reduces))


def store_bytes(
    c: Context, addresses: Any, data: npt.NDArray[Any], size: int, instruction: int, *, lane: int, reduces: bool = False
) -> None:
    """Writes units of `size` bytes to global memory for a copy that `lane` issued."""
    store_located(c, addresses, data, size, np.full(np.size(addresses), lane), instruction, copy=True, reduces=reduces)


def read_map(c: Context, address: int, lane: int, instruction: int) -> bytes:
    """The bytes of a tensor map at a generic address, for TMA."""
    if c.group.maps is not None:
        maker = c.group.maps.use(*_warp(c, lane), address)
        if maker is not None:
            c.group.run.map_races[instruction, maker] = None
    return map_bytes(c, address, lane, instruction)


def map_bytes(c: Context, address: int, lane: int, instruction: int) -> bytes:
    """The bytes of a tensor map at a generic address."""
    window = address >> 60
    if window == PARAM_WINDOW >> 60:
        start = address & ((1 << 40) - 1)
        return bytes(c.group.run.parameter_bytes[start : start + tensor_map.BYTES])
    if window == SHARED_WINDOW >> 60:
        return shared_map(c, address & 0xFFFFFFFF, lane, instruction)
    places = np.uint64(address) + np.arange(0, tensor_map.BYTES, 16, dtype=np.uint64)
    return load_bytes(c, places, 16, instruction, lane=lane).tobytes()


def shared_map(c: Context, address: int, lane: int, instruction: int) -> bytes:
    """The bytes of a tensor map in the lane's CTA's shared memory; what nobody has written counts as zero."""
    start = _shared_start(c, address, lane, instruction)
    group, places = c.group, np.arange(start, start + tensor_map.BYTES, 16)
    if group.run.observer is not None:
        group.run.observer.shared_read(c, np.full(len(places), lane), places, 16, instruction)
    raw = group.shared[start : start + tensor_map.BYTES].copy()
    if group.written is not None:
        raw[~group.written[start : start + tensor_map.BYTES]] = 0
    return raw.tobytes()


def write_map(c: Context, address: int, data: bytes, lane: int, instruction: int) -> None:
    """Writes a tensor map to a generic address."""
    if address >> 60 == SHARED_WINDOW >> 60:
        write_shared_map(c, address & 0xFFFFFFFF, data, lane, instruction)
        return
    if c.group.maps is not None:
        c.group.maps.write(*_warp(c, lane), address, instruction)
    places = np.uint64(address) + np.arange(0, tensor_map.BYTES, 16, dtype=np.uint64)
    store_bytes(c, places, np.frombuffer(data, np.complex128), 16, instruction, lane=lane)


def write_shared_map(c: Context, address: int, data: bytes, lane: int, instruction: int) -> None:
    """Writes a tensor map into the lane's CTA's shared memory."""
    start = _shared_start(c, address, lane, instruction)
    places = np.arange(start, start + tensor_map.BYTES, 16)
    if c.group.run.observer is not None:
        c.group.run.observer.shared_write(c, np.full(len(places), lane), places, 16, instruction, None)
    c.group.shared[start : start + tensor_map.BYTES] = np.frombuffer(data, np.uint8)
    if c.group.written is not None:
        c.group.written[start : start + tensor_map.BYTES] = True


def fence_map(c: Context, address: int, lane: int) -> None:
    """`fence.proxy.tensormap` of a map at a generic address."""
    if c.group.maps is not None:
        c.group.maps.fence(*_warp(c, lane), address)


def _warp(c: Context, lane: int) -> tuple[int, int]:
    """The race detector's slot of a lane, and its warp there."""
    return divmod(int(c.warps[lane]), c.group.race_warps)


def _shared_start(c: Context, address: int, lane: int, instruction: int) -> int:
    if address + tensor_map.BYTES > c.group.run.shared_limit:
        raise Fault(f"a tensor map at shared address 0x{address:x} ends outside the CTA's memory", instruction)
    return int(c.slots[lane]) * c.group.shared_size + address

"""Runs what makes tensor maps on the device: `tensormap.replace`, `tensormap.cp_fenceproxy` (PTX ISA 8.7, 9.7.9.28)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rooflab.bench.ptx.execute import raw
from rooflab.bench.ptx.execute.bulk import issuers, value_of
from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.tiles import tensor_map


def replace(
    c: Context, space: str, addresses: Any, field: str, ordinal: int, value: Any, guard: Any, instruction: int
) -> None:
    """`tensormap.replace`."""
    for lane in issuers(c, guard):
        address = value_of(addresses, lane)
        read, write = (raw.shared_map, raw.write_shared_map) if space == "shared" else (raw.map_bytes, raw.write_map)
        unit = 16 if c.group.run.old_strides else 1
        try:
            made = tensor_map.replace(
                read(c, address, lane, instruction), field, ordinal, value_of(value, lane), stride_unit=unit
            )
        except ValueError as error:
            raise Fault(str(error), instruction) from None
        write(c, address, made, lane, instruction)


def copy(c: Context, targets: Any, sources: Any, guard: Any, instruction: int) -> None:
    """`tensormap.cp_fenceproxy`: a finished map from shared to global memory, once for each warp."""
    for lane in _tellers(c, targets, guard):
        data = raw.shared_map(c, value_of(sources, lane) & 0xFFFFFFFF, lane, instruction)
        raw.write_map(c, value_of(targets, lane), data, lane, instruction)


def fence(c: Context, addresses: Any, guard: Any, instruction: int) -> None:
    """`fence.proxy.tensormap::generic`, of the map at an address."""
    for lane in _tellers(c, addresses, guard):
        raw.fence_map(c, value_of(addresses, lane), lane)


def _tellers(c: Context, addresses: Any, guard: Any) -> Iterator[int]:
    """For each warp and each address that it gives, one lane."""
    seen: set[tuple[int, int]] = set()
    for lane in issuers(c, guard):
        what = int(c.warps[lane]), value_of(addresses, lane)
        if what not in seen:
            seen.add(what)
            yield lane

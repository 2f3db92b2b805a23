"""One instruction's accesses of shared memory, and which earlier stamps are not ordered before them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.races.shadow_memory import Cells, Ints, LastOf, Late, Shadow
from rooflab.bench.ptx.races.vector_clocks import (
    ACTOR,
    ACTOR_BITS,
    ASYNC,
    GENERIC,
    INIT,
    Stamps,
    Transfer,
    VectorClocks,
)

Value = npt.NDArray[np.generic] | np.generic
"""(n,), or the same for all lanes; of any type of up to 8 bytes, or complex128 for 16."""
Values = Value | Sequence[Value]
"""What a store writes: a whole unit a lane, or a register for each element of the store's vector."""
Bools = npt.NDArray[np.bool_]

_LANES = np.arange(1024, dtype=np.int32)


class Lanes:
    """Accesses by lanes, through the generic proxy; with `copies` by their warps' cp.async streams."""

    def __init__(
        self,
        clocks: VectorClocks,
        shadow: Shadow,
        slots: Ints | int,
        warps: Ints,
        addresses: Ints,
        width: int,
        instruction: int,
        copies: bool = False,
    ) -> None:
        self._clocks, self._shadow = clocks, shadow
        if not addresses.ndim:
            addresses = np.broadcast_to(addresses, warps.shape)
        self.cells: Cells = shadow.cells(addresses, width)
        self._rows = slots * clocks.warps + warps
        self.actors: Ints = clocks.copy_actors(warps) if copies else warps
        self.stamps: Stamps = clocks.current.take(slots * clocks.actors + self.actors) + (instruction << ACTOR_BITS)

    def late_writes(self, of_mbarrier: bool = False) -> Late | None:
        """Last writes that are not ordered before the lanes; for uses of an mbarrier a fence of its init will do."""
        known = self._clocks.known[GENERIC].reshape(-1)
        stamps = self._shadow.writes.take(self.cells.granules)
        late = stamps >= known.take((stamps & ACTOR) + (self._rows * self._clocks.actors)[:, None])
        if of_mbarrier and late.any():
            known = self._clocks.known[INIT].reshape(-1)
            late &= stamps >= known.take((stamps & ACTOR) + (self._rows * self._clocks.actors)[:, None])
        return _late(late, self.cells, stamps) if late.any() else None

    def late(self, table: LastOf | None, actors: int) -> Late | None:
        """Stamps of a table of `actors` that are not ordered before the lanes; None where there is no table."""
        if table is None:
            return None
        known = self._clocks.known[GENERIC, :, :, :actors].reshape(-1, actors)
        return table.late(self.cells, known.take(self._rows, axis=0))

    def actors_of(self, late: Late) -> Ints:
        """(m,): who met each of `late`."""
        return self.actors[late.access]

    def but_for_proxy(self, late: Late) -> Bools:
        """(m,): whether each is ordered but for a proxy fence, which the generic proxy never needs here."""
        return np.zeros(late.access.size, np.bool_)

    def collisions(self) -> tuple[Ints, Ints] | None:
        """Pairs of accesses of one granule within the instruction (each with the one that wrote last), if any.

        Widths are equal and addresses aligned, so accesses overlap whole or not at all: first granules tell.
        """
        first = self.cells.granules[:, 0]
        lanes = _LANES[: first.size] if first.size <= _LANES.size else np.arange(first.size, dtype=np.int32)
        self._shadow.winners[first] = lanes
        winners = self._shadow.winners.take(first)
        clash = winners != lanes
        if not clash.any():
            return None
        losers = np.flatnonzero(clash)
        return losers, winners[losers].astype(np.int64)


class Operation:
    """Accesses by one asynchronous operation, through the async proxy."""

    def __init__(self, shadow: Shadow, transfer: Transfer, addresses: Ints, width: int, instruction: int) -> None:
        self._shadow, self._transfer = shadow, transfer
        self.cells: Cells = shadow.cells(addresses, width)
        self.stamp = transfer.stamp + (instruction << ACTOR_BITS)

    def late_writes(self, plane: int = ASYNC) -> Late | None:
        """Last writes that are not ordered before the operation, in the async plane unless told."""
        stamps = self._shadow.writes.take(self.cells.granules)
        late = stamps >= self._transfer.known[plane].take(stamps & ACTOR)
        return _late(late, self.cells, stamps) if late.any() else None

    def late(self, table: LastOf | None, actors: int, plane: int = ASYNC) -> Late | None:
        """Stamps of a table of `actors` that are not ordered before the operation; None where there is no table."""
        if table is None:
            return None
        return table.late(self.cells, self._transfer.known[plane, None, :actors])

    def actors_of(self, late: Late) -> Ints:
        """(m,): the operation, for each of `late`."""
        return np.full(late.access.size, self._transfer.actor)

    def but_for_proxy(self, late: Late) -> Bools:
        """(m,): whether each is ordered in the generic plane, so that only a proxy fence is missing."""
        known = self._transfer.known[GENERIC].take(late.stamps & ACTOR)
        ordered: Bools = late.stamps < known
        return ordered


def equal(values: Values, others: Values, accesses: int) -> Bools:
    """(accesses,): where all registers hold the same bits; NaNs with the same bits are equal."""
    same = np.ones(accesses, np.bool_)
    for value, other in zip(_registers(values), _registers(others), strict=True):
        same &= (_words(value) == _words(other)).all(axis=1)
    return same


def chosen(values: Values, lanes: Ints) -> Values:
    """The registers of some lanes only."""
    return [value[lanes] if isinstance(value, np.ndarray) else value for value in _registers(values)]


def _registers(values: Values) -> Sequence[Value]:
    return [values] if isinstance(values, np.ndarray | np.generic) else values


def _words(value: Value) -> npt.NDArray[np.unsignedinteger]:
    """(n or 1, words): the bits."""
    column = np.ascontiguousarray(value).reshape(-1, 1)
    words: npt.NDArray[np.unsignedinteger] = column.view(f"u{min(column.itemsize, 8)}")
    return words


def _late(late: Bools, cells: Cells, stamps: Stamps) -> Late:
    return Late(np.nonzero(late)[0], cells.granules[late], stamps[late])

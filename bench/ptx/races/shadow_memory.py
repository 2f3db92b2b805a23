"""For every granule of shared memory, the stamp of the last write and of every reader's last read.

Beside the granules' stamps of reads stands the latest one of every block of 1 KiB: a reader's clock only grows, so
where a block's latest read is ordered before a write, all of the block are, and no granule needs a look.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.races.vector_clocks import Stamps

BLOCK_SHIFT = 10
"""Log2 of the bytes of a block."""
GRANULES = (1, 2, 4, 8, 16)
"""Bytes that a granule may have: no access is wider by lane than the last."""

Ints = npt.NDArray[np.int64]


class Cells(NamedTuple):
    """Where n accesses of k granules each go."""

    granules: Ints
    """(n, k)."""
    blocks: Ints
    """(n,): the block in which each lies."""


class Late(NamedTuple):
    """Stamps found that are not ordered before the access that looked, m of them."""

    access: Ints
    """(m,): which of the n accesses."""
    granules: Ints
    """(m,)."""
    stamps: Stamps
    """(m,)."""


class LastOf:
    """The last stamp that each of `actors` left on each of `granules`; a later one of an actor replaces an earlier."""

    def __init__(self, actors: int, granules: int, shift: int) -> None:
        self._actors, self._granules = actors, granules
        self._stamps: Stamps = np.zeros(actors * granules, np.int64)
        blocks = (granules >> (BLOCK_SHIFT - shift)) + 1
        self._blocks: Stamps = np.zeros((blocks, actors), np.int64)
        self._flat_blocks = self._blocks.reshape(-1)

    def record(self, actors: Ints, cells: Cells, stamps: Stamps) -> None:
        """Stamp the accesses' granules, with one actor (n,) and stamp (n,) for each."""
        first = cells.granules + (actors * self._granules)[:, None]
        self._stamps[first] = stamps[:, None]
        self._flat_blocks[cells.blocks * self._actors + actors] = stamps

    def record_one(self, actor: int, cells: Cells, stamp: int) -> None:
        """Stamp all accesses' granules as `actor`'s, with one stamp."""
        self._stamps[actor * self._granules : (actor + 1) * self._granules][cells.granules] = stamp
        self._blocks[cells.blocks, actor] = stamp

    def late(self, cells: Cells, known: Stamps) -> Late | None:
        """What is not below `known` (n or 1, actors): None where all is, which is the fast way."""
        blocks = self._blocks.take(cells.blocks, axis=0) >= known
        if not blocks.any():
            return None
        access, actor = np.nonzero(blocks)
        granules = cells.granules[access]
        stamps = self._stamps[granules + (actor * self._granules)[:, None]]
        limits = np.broadcast_to(known, blocks.shape)[access, actor]
        row, column = np.nonzero(stamps >= limits[:, None])
        return Late(access[row], granules[row, column], stamps[row, column]) if row.size else None


class Shadow:
    """Stamps of `size` bytes in granules of 2 ** `shift` bytes: writes, reads, and atomics once there is one."""

    def __init__(self, size: int, shift: int, readers: int, warps: int) -> None:
        self.shift = shift
        self._warps = warps
        self._count = size >> shift
        self.writes: Stamps = np.zeros(self._count, np.int64)
        self.reads = LastOf(readers, self._count, shift)
        self.atomics: LastOf | None = None
        self.winners: npt.NDArray[np.int32] = np.zeros(self._count, np.int32)
        """Scratch: which access of one instruction wrote a granule last."""
        self._spans: dict[int, Ints] = {}

    def cells(self, addresses: npt.NDArray[np.integer], width: int) -> Cells:
        """Granules of n accesses of `width` bytes at flat byte `addresses` (n,)."""
        count = width >> self.shift
        span = self._spans.get(count)
        if span is None:
            span = self._spans[count] = np.arange(count)
        flat = addresses.astype(np.int64, copy=False)
        return Cells((flat >> self.shift)[:, None] + span, flat >> BLOCK_SHIFT)

    def all_atomics(self) -> LastOf:
        """`atomics`, made at the first call: most kernels have none."""
        if self.atomics is None:
            self.atomics = LastOf(self._warps, self._count, self.shift)
        return self.atomics

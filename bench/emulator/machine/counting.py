"""Counts what a launch moves: bytes, sectors of global memory, bank conflicts of shared memory.

An instruction's pattern of addresses mostly repeats from one turn of a loop to the next, so the cost of each pattern is
cached: counting then takes 2 us per access instead of 20 us.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.memory import Allocation, GlobalMemory

SECTOR = 32
"""Bytes that L2 transfers at once."""
BANKS = 32
BANK_BYTES = 4
Ints = npt.NDArray[np.integer]


class Acting(Protocol):
    """The part of a context (lanes that act together) that the counter uses."""

    size: int
    lanes: npt.NDArray[np.int64]
    warps: npt.NDArray[np.int64]
    """The warp of each lane; warps are numbered through the whole group of CTAs."""

    @property
    def pattern(self) -> bytes: ...


class Counter:
    """The counts of one launch."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], int] = defaultdict(int)
        """The number of lanes that ran a basic block, by the block's first instruction and the context's grain."""
        self.totals: dict[str, int] = defaultdict(int)
        self.by_instruction: dict[tuple[int, str], int] = defaultdict(int)
        self._sectors: dict[tuple[int, ...], int] = {}
        self._wavefronts: dict[tuple[int, ...], tuple[int, int]] = {}

    def add(self, what: str, amount: int, instruction: int) -> None:
        """Adds an amount to the total and to the instruction's count."""
        self.totals[what] += amount
        self.by_instruction[(instruction, what)] += amount

    def global_access(
        self,
        c: Acting,
        active: Any,
        allocation: Allocation,
        addresses: Any,
        size: int,
        instruction: int,
        kind: str,
        copy: bool,
    ) -> None:
        """Counts an access to global memory by lanes, or by an asynchronous `copy`; `kind` is `read` or `write`."""
        where = np.atleast_1d(addresses)
        touch(allocation, where, kind)
        if copy:
            self.add(f"copy_{kind}_bytes", size * len(where), instruction)
            return
        lanes = c.size if active is None else len(active)
        self.add(f"global_{kind}_bytes", size * lanes, instruction)
        warps = c.warps if active is None else c.warps[active]
        if len(where) == 1:
            sectors = len(np.unique(warps)) * max(1, size // SECTOR)
        else:
            relative = where - where[0]
            phase = int(where[0]) % SECTOR
            key = _key(c, active, instruction, phase, relative)
            if key not in self._sectors:
                self._sectors[key] = _sectors(relative.astype(np.int64) + phase, warps, size)
            sectors = self._sectors[key]
        self.add(f"global_{kind}_sector_bytes", SECTOR * sectors, instruction)

    def atomic(self, memory: GlobalMemory, addresses: Any, size: int, instruction: int) -> None:
        """Counts atomic operations on global memory: an atomic reads the value that it changes."""
        self.add("atomic_bytes", size * len(addresses), instruction)
        place = memory.locate(addresses, size)
        lots = [(place[0], addresses)] if place is not None else [(memory.find(int(at)), at[None]) for at in addresses]
        for allocation, where in lots:
            assert allocation is not None  # the operation itself has accessed it
            touch(allocation, where, "read")
            touch(allocation, where, "write")

    def shared_access(self, c: Acting, active: Any, offsets: Any, size: int, instruction: int, kind: str) -> None:
        """Counts an access to shared memory; `kind` is `read` or `write`."""
        where = np.atleast_1d(offsets)
        lanes = c.size if active is None else len(active)
        self.add(f"shared_{kind}_bytes", size * lanes, instruction)
        if len(where) == 1:
            taken = least = len(np.unique(_lanes(c, active) // (32 // max(1, size // BANK_BYTES))))
        else:
            relative = where - where[0]
            phase = int(where[0]) % (BANKS * BANK_BYTES)
            key = _key(c, active, instruction, phase, relative)
            if key not in self._wavefronts:
                self._wavefronts[key] = _wavefronts(relative.astype(np.int64) + phase, _lanes(c, active), size)
            taken, least = self._wavefronts[key]
        self.add("shared_wavefronts", taken, instruction)
        self.add("shared_wavefronts_least", least, instruction)


def _lanes(c: Acting, active: Any) -> Ints:
    lanes: Ints = c.lanes if active is None else c.lanes[active]
    return lanes


def _key(c: Acting, active: Any, instruction: int, phase: int, relative: npt.NDArray[Any]) -> tuple[int, ...]:
    """The key of an access's pattern.  The key holds hashes, because a kernel may have as many patterns as accesses."""
    lanes = 0 if active is None else hash(active.tobytes())
    return instruction, phase, hash(relative.tobytes()), lanes, c.size, hash(c.pattern)


def _sectors(addresses: npt.NDArray[np.int64], warps: Ints, size: int) -> int:
    """The number of sectors that the warps' requests touch, counted per warp."""
    first = addresses // SECTOR
    if size > SECTOR:
        raise ValueError(f"size: expected at most {SECTOR} bytes, got {size}")
    return len(np.unique(warps.astype(np.int64) * (1 << 44) + (first - first.min())))


def _wavefronts(offsets: npt.NDArray[np.int64], lanes: Ints, size: int) -> tuple[int, int]:
    """The wavefronts (turns of shared memory) of an access, and the fewest wavefronts for the same number of bytes.

    Shared memory serves requests of 8 or 16 bytes per lane by halves or quarters of the warp (CUDA C++ programming
    guide, "Shared Memory").  A wavefront serves every bank once, with one word for any number of lanes.
    """
    parts = max(1, size // BANK_BYTES)
    phase = lanes.astype(np.int64) // (32 // parts)
    phase -= phase[0]
    words = (offsets // BANK_BYTES)[:, None] + np.arange(parts)
    low = words.min()
    span = int(words.max() - low) + 1
    # The distinct words that each phase needs.
    needed = np.unique((phase[:, None] * span + (words - low)).ravel())
    phases, places = np.divmod(needed, span)
    turns = np.bincount(phases * BANKS + (places + low) % BANKS, minlength=(int(phases[-1]) + 1) * BANKS)
    worst = turns.reshape(-1, BANKS).max(axis=1)
    return int(worst.sum()), int(np.count_nonzero(worst))


def touch(allocation: Allocation, addresses: Any, kind: str) -> None:
    """Marks the sectors of an allocation that an access reads or writes (`kind`)."""
    name = f"sectors_{'read' if kind == 'read' else 'written'}"
    marked = getattr(allocation, name)
    start = allocation.base // SECTOR
    if marked is None:
        marked = np.zeros((allocation.end - 1) // SECTOR - start + 1, np.bool_)
        setattr(allocation, name, marked)
    # Accesses are aligned and at most 16 bytes wide: no access lies in two sectors.
    marked[(addresses.astype(np.int64) // SECTOR) - start] = True

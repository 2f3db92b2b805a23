"""Counts the memory traffic of a launch: bytes, sectors of global memory, bank conflicts of shared memory.

Most instructions repeat their pattern of addresses in each iteration of a loop.  So the counts of each pattern are
cached: counting then takes 2 us per access instead of 20 us.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.memory import Allocation, GlobalMemory

SECTOR = 32
"""Bytes that L2 transfers at once."""
BANK_COUNT = 32
BANK_BYTES = 4
Ints = npt.NDArray[np.integer]


class Acting(Protocol):
    """Describes the attributes that the counter reads from a context, which is a group of lanes that run together."""

    size: int
    lanes: npt.NDArray[np.int64]
    warps: npt.NDArray[np.int64]
    """The warp of each lane; warps are numbered through the whole group of CTAs."""

    @property
    def pattern(self) -> bytes: ...


class Counter:
    """Holds the counts of memory traffic of one launch."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], int] = defaultdict(int)
        """The number of lanes that ran a basic block, by the block's first instruction and the context's grain."""
        self.totals: dict[str, int] = defaultdict(int)
        self.by_instruction: dict[tuple[int, str], int] = defaultdict(int)
        self._patterns: dict[tuple[int, ...], Any] = {}

    def add(self, what: str, amount: int, instruction: int) -> None:
        """Adds `amount` to the counter `what`: to its total, and to its count for this `instruction` (a number)."""
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
        """Counts an access to global memory by lanes, or by an asynchronous copy.  `kind` is `read` or `write`."""
        address_array = np.atleast_1d(addresses)
        touch(allocation, address_array, kind)
        if copy:
            self.add(f"copy_{kind}_bytes", size * len(address_array), instruction)
            return
        lanes = c.size if active is None else len(active)
        self.add(f"global_{kind}_bytes", size * lanes, instruction)
        warps = c.warps if active is None else c.warps[active]
        if len(address_array) == 1:
            sectors = len(np.unique(warps)) * max(1, size // SECTOR)
        else:
            count = lambda near: _sectors(near, warps, size)
            sectors = self._of_pattern(c, active, instruction, address_array, SECTOR, count)
        self.add(f"global_{kind}_sector_bytes", SECTOR * sectors, instruction)

    def _of_pattern(
        self, c: Acting, active: Any, instruction: int, places: Any, period: int, count: Callable[[Any], Any]
    ) -> Any:
        """Returns `count` of the places, moved down by a multiple of `period`.  The key of a pattern contains hashes
        instead of places, which keeps it small."""
        relative, phase = places - places[0], int(places[0]) % period
        lanes = 0 if active is None else hash(active.tobytes())
        key = instruction, phase, hash(relative.tobytes()), lanes, c.size, hash(c.pattern)
        if key not in self._patterns:
            self._patterns[key] = count(relative.astype(np.int64) + phase)
        return self._patterns[key]

    def atomic(self, memory: GlobalMemory, addresses: Any, size: int, instruction: int) -> None:
        """Counts atomic operations on global memory.  Each atomic operation counts as a read and a write."""
        self.add("atomic_bytes", size * len(addresses), instruction)
        for allocation, inside in memory.parts(addresses):
            touch(allocation, addresses[inside], "read")
            touch(allocation, addresses[inside], "write")

    def shared_access(self, c: Acting, active: Any, offsets: Any, size: int, instruction: int, kind: str) -> None:
        """Counts an access to shared memory; `kind` is `read` or `write`."""
        offset_array = np.atleast_1d(offsets)
        lanes = c.size if active is None else len(active)
        self.add(f"shared_{kind}_bytes", size * lanes, instruction)
        if len(offset_array) == 1:
            wavefronts = min_wavefronts = len(np.unique(_lanes(c, active) // (32 // max(1, size // BANK_BYTES))))
        else:
            count = lambda near: _wavefronts(near, _lanes(c, active), size)
            period = BANK_COUNT * BANK_BYTES
            wavefronts, min_wavefronts = self._of_pattern(c, active, instruction, offset_array, period, count)
        self.add("shared_wavefronts", wavefronts, instruction)
        self.add("shared_wavefronts_least", min_wavefronts, instruction)


def _lanes(c: Acting, active: Any) -> Ints:
    lanes: Ints = c.lanes if active is None else c.lanes[active]
    return lanes


def _sectors(addresses: npt.NDArray[np.int64], warps: Ints, size: int) -> int:
    """Counts the 32-byte memory sectors that the accesses touch. A sector counts once for each warp that touches it."""
    sector_ids = addresses // SECTOR
    if size > SECTOR:
        raise ValueError(f"size: expected at most {SECTOR} bytes, got {size}")
    return len(np.unique(warps.astype(np.int64) * (1 << 44) + (sector_ids - sector_ids.min())))


def _wavefronts(offsets: npt.NDArray[np.int64], lanes: Ints, size: int) -> tuple[int, int]:
    """Returns the number of wavefronts of an access, and the minimum for an access of the same size.

    A wavefront is one pass through shared memory, in which each bank delivers one word to any number of lanes.  With 8
    bytes per lane, each half of the warp is served separately; with 16 bytes, each quarter (CUDA C++ programming guide,
    "Shared Memory")."""
    words_per_lane = max(1, size // BANK_BYTES)
    lane_phases = lanes.astype(np.int64) // (32 // words_per_lane)
    lane_phases -= lane_phases[0]
    lane_words = (offsets // BANK_BYTES)[:, None] + np.arange(words_per_lane)
    low_word = lane_words.min()
    word_span = int(lane_words.max() - low_word) + 1
    # The distinct words that each phase needs.
    distinct_words = np.unique((lane_phases[:, None] * word_span + (lane_words - low_word)).ravel())
    phase_ids, word_offsets = np.divmod(distinct_words, word_span)
    word_counts = np.bincount(
        phase_ids * BANK_COUNT + (word_offsets + low_word) % BANK_COUNT, minlength=(int(phase_ids[-1]) + 1) * BANK_COUNT
    )
    pass_counts = word_counts.reshape(-1, BANK_COUNT).max(axis=1)
    return int(pass_counts.sum()), int(np.count_nonzero(pass_counts))


def touch(allocation: Allocation, addresses: Any, kind: str) -> None:
    """Marks the sectors of an allocation that an access uses.  `kind` is `read` or `write`."""
    field_name = f"sectors_{'read' if kind == 'read' else 'written'}"
    sector_flags = getattr(allocation, field_name)
    first_sector = allocation.base // SECTOR
    if sector_flags is None:
        sector_flags = np.zeros((allocation.end - 1) // SECTOR - first_sector + 1, np.bool_)
        setattr(allocation, field_name, sector_flags)
    # Accesses are aligned and at most 16 bytes wide: no access lies in two sectors.
    sector_flags[(addresses.astype(np.int64) // SECTOR) - first_sector] = True

"""Describes one launch in the emulator: its inputs, the CTAs that run together, and the observations."""

from __future__ import annotations

import math
import operator
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.faults import Finding, Rule
from rooflab.bench.emulator.machine.counting import Counter
from rooflab.bench.emulator.machine.launch_order import Turn
from rooflab.bench.emulator.machine.memory import POISON, UNIT_DTYPES, GlobalMemory
from rooflab.bench.emulator.machine.observe import Observer
from rooflab.bench.emulator.machine.sums import Sums
from rooflab.bench.emulator.races.global_races import GlobalRaces
from rooflab.bench.emulator.races.granules import Granules
from rooflab.bench.emulator.races.lane_stores import LaneStores
from rooflab.bench.emulator.races.shared_races import SharedRaces
from rooflab.bench.emulator.races.vector_clocks import MapOrder
from rooflab.bench.emulator.races.warp_races import WarpRaces
from rooflab.bench.emulator.text.program import Program
from rooflab.bench.emulator.text.syntax import PtxError, SizeTriple

MOST_THREADS = 1024
SMS = 132
"""The number of multiprocessors of an H100."""
SHARED_LIMIT = 227 << 10
"""The most bytes of shared memory that a CTA may have on Hopper."""
SECONDS, DEFAULT_SECONDS = "ROOFLAB_EMULATE_SECONDS", "120"
"""The environment variable for the seconds of processor time in which a CTA must end, and its default."""
MOST_GRANULES = 1 << 28
"""The most granules of global memory, of 1 to 16 bytes, on which races between warps are looked for: 1 GiB of fp32."""
Lanes = npt.NDArray[np.int64]
"""An array of lane numbers."""


def most_seconds() -> float:
    """Reads a CTA's limit in processor seconds from the environment.  Raises `ValueError` if it is not a number."""
    limit_text = os.environ.get(SECONDS, DEFAULT_SECONDS)
    if not re.fullmatch(r"\d+\.?\d*", limit_text):
        raise ValueError(f"{SECONDS}: expected a number of seconds, got {limit_text!r}")
    return float(limit_text)


class EmulationError(RuntimeError):
    """Raised if the kernel broke a rule of the GPU, even a rule that a GPU does not check.  Names the source line."""

    def __init__(self, fault: Finding):
        super().__init__(fault)
        self.fault = fault

    def __str__(self) -> str:
        return f"[{self.fault.rule}] {self.fault.kernel}: {self.fault.text}"


class Fault(Exception):
    """Reports a fault of one instruction.  The scheduler turns it into an `EmulationError`.

    `lane` is the number of the faulty lane among the CTAs that run together, or None if not known.  Most faults break
    `rule` of their own instruction.
    """

    def __init__(self, text: str, instruction: int, lane: int | None = None, rule: Rule = "invalid-use"):
        super().__init__(text)
        self.instruction = instruction
        self.lane = lane
        self.rule: Rule = rule


@dataclass(frozen=True)
class Checks:
    """Selects the checks that the emulator makes besides computing values.  Each check costs time."""

    races: bool = True
    """Whether to look for races: accesses to shared and global memory that nothing orders."""
    uninitialised: bool = True
    """Whether to look for reads of memory that was never written."""
    asynchronous: bool = True
    """Whether copies end as late as possible; until then their destinations hold poison."""
    counts: bool = True
    """Whether to count bytes, sectors, bank conflicts and instructions.  A look for races counts them too."""


class VariableLayout(NamedTuple):
    """Holds the addresses of a kernel's variables and parameters, and the sizes of its shared and local memory."""

    addresses: dict[str, int]
    static_shared: int
    """The bytes of static shared memory, without the dynamic bytes that the launch adds."""
    local_size: int
    """The bytes of local memory of one lane."""


class Run:
    """Holds the state of one launch of the kernel `program`, with a grid of CTAs."""

    def __init__(
        self,
        program: Program,
        grid: SizeTriple,
        block: SizeTriple,
        cluster: SizeTriple,
        memory: GlobalMemory,
        parameters: bytes,
        layout: VariableLayout,
        dynamic_shared: int,
        checks: Checks,
        seed: int = 0,
        short_accumulator: bool = False,
    ):
        self.program, self.grid, self.block, self.cluster = program, grid, block, cluster
        self.has_clusters = cluster != (1, 1, 1)
        self.memory = memory
        self.parameter_bytes: npt.NDArray[np.uint8] = np.frombuffer(parameters + bytes(-len(parameters) % 16), np.uint8)
        self.addresses = layout.addresses
        """The addresses of variables and parameters, each in its own state space."""
        self.dynamic_shared = dynamic_shared
        self.shared_limit = layout.static_shared + dynamic_shared
        self.shared_size = -(-self.shared_limit // 1024) * 1024
        self.local_size = -(-layout.local_size // 16) * 16
        self.checks = checks
        self.seed = seed
        self.random = random.Random(seed) if seed else None
        self.short_accumulator = short_accumulator
        self.steps = 0
        self.deadline = math.inf
        """The thread's processor time at which a CTA should have ended."""
        self.stored: list[tuple[Any, int]] | None = None
        """The addresses and the width of every store to global memory; None if the caller did not ask for them."""
        self.printed: list[str] = []
        """The lines that the kernel printed so far, each with its CTA and thread."""
        self.changes = 0
        """The number of stores, and of atomics that changed a value, in this launch so far."""
        ptx_version = [int(version_part) for version_part in program.version.split(".")]
        self.old_strides = ptx_version < [8, 6]
        """Whether the PTX is older than 8.6: ptxas took the strides of `tensormap.replace` in 16-byte units."""
        self.counter = Counter()
        cta_count = grid[0] * grid[1] * grid[2]
        self.orders_ctas = program.orders_ctas or self.has_clusters
        warps_per_cta = -(-block[0] * block[1] * block[2] // 32)
        self.actors_per_cta = warps_per_cta if self.orders_ctas else 1
        """The number of race-detector actors of a CTA: its warps if CTAs may wait for one another, else 1."""
        self.global_races, self.warp_races = self._detectors(cta_count, warps_per_cta) if checks.races else (None, None)
        self.observer = self._observer() if checks.counts or checks.races else None
        self.turn: Turn | None = None
        self.sums: dict[int, Sums] = {}
        """By address of an allocation: the sums of floats that atomics compute there."""
        self.unordered_sums: dict[int, None] = {}
        """Atomics that add floats of several warps to one place, in an order that the sum's last bits show."""
        self.unwritten_reads: dict[int, str] = {}
        """By instruction: what it read of a tensor of which earlier launches wrote another part."""
        self.shared_races: list[Any] = []
        self.register_races: dict[int, None] = {}
        """Instructions that read an accumulator whose wgmma may still be running."""
        self.lane_releases: dict[int, int] = {}
        """By store: a release by another lane of its warp, with nothing that orders the two lanes."""
        self.uneven_barriers: dict[int, None] = {}
        """Barriers that warps still meet at after another warp of their CTA, which met there before, has gone on."""
        self.map_races: dict[tuple[int, int], None] = {}
        """Uses of tensor maps that lack a fence, each with the instruction that made the map."""

    def _observer(self) -> Observer:
        watchers = self.counter, self.global_races, self.warp_races
        facts = self.program.kernel, self.program.strong, self.actors_per_cta, self.has_clusters
        return Observer(*facts, *watchers)

    def _detectors(self, ctas: int, warps: int) -> tuple[GlobalRaces | None, WarpRaces | None]:
        """Makes the detectors of races on global memory: between CTAs, and between the warps of a CTA."""
        allocations = ((allocation.base, allocation.size) for allocation in self.memory.allocations)
        granules = Granules(self.program.granules["global"], allocations)
        instructions = self.program.kernel.instructions
        copies = (each for each in instructions if "bulk" in each.parts or each.parts[0] == "tensormap")
        by_tma = {each.number: each.parts[0] == "cp" for each in copies}
        between_ctas = GlobalRaces(ctas, granules, warps=self.actors_per_cta, by_tma=by_tma) if ctas > 1 else None
        stores_of = cache(self.program.flow.stores_of)
        is_small = granules.count <= MOST_GRANULES
        return between_ctas, WarpRaces(granules, ctas, warps, stores_of) if warps > 1 and is_small else None

    def count(self, place: int, grain: int, lanes: int) -> None:
        """Counts one execution of a basic block by `lanes` lanes."""
        self.steps += 1
        if self.observer is not None:
            self.counter.blocks[(place, grain)] += lanes


class CtaGroup:
    """Holds CTAs that run together: a cluster, or CTAs that share no memory.  `ctas` are their numbers in the grid."""

    def __init__(self, run: Run, ctas: list[int]):
        self.run = run
        self.program = run.program
        self.memory = run.memory
        self.ctas = ctas
        self.block, self.grid = run.block, run.grid
        cta_threads = self.block[0] * self.block[1] * self.block[2]
        self.lanes_per_cta = -(-cta_threads // 32) * 32
        self.pieces_per_cta = -(-self.lanes_per_cta // 128)
        self.shared_size = run.shared_size
        self.shared: npt.NDArray[np.uint8] = np.full(len(ctas) * self.shared_size, POISON, np.uint8)
        self.views = {unit_bytes: self.shared.view(dtype) for unit_bytes, dtype in UNIT_DTYPES.items()}
        """By access width in bytes: a view of the group's shared memory."""
        self.written = np.zeros(len(self.shared), bool) if run.checks.uninitialised else None
        self.local: npt.NDArray[np.uint8] | None = None
        self.local_written: npt.NDArray[np.bool_] | None = None
        lane_numbers = np.arange(len(ctas) * self.lanes_per_cta)
        self.alive = lane_numbers % self.lanes_per_cta < cta_threads
        self.race_warps = len(lane_numbers) // 32 if run.has_clusters else self.lanes_per_cta // 32
        """The warps of a race detector's slot.  A slot is a CTA, or a cluster, whose CTAs reach each other's memory."""
        self.race_bytes = len(self.shared) if run.has_clusters else self.shared_size
        """The bytes of shared memory of one slot of the race detector."""
        self.sums: Sums | None = None
        """The sums of floats that atomics compute in shared memory."""
        self.races: SharedRaces | None = None
        self.lane_stores: LaneStores | None = None
        self.maps: MapOrder | None = None
        self.waiting: Any = None
        """The group's `waiting.Waiting`, for `waiting.waiting_of`; untyped, because waiting.py imports this file."""
        self.met: dict[int, npt.NDArray[np.bool_]] = {}
        """By barrier instruction: the warps that have left the barrier.  Only barriers for all threads are noted."""
        self.accumulators: dict[int, Any] = {}
        """By buffer: the accumulators of a chain of wgmmas."""
        self.warpgroups: dict[int, Any] = {}
        """By warpgroup: its groups of wgmmas."""
        self._specials: dict[str, Any] = {}

    def race_slot(self, slot: int) -> int:
        """Returns the race detector's index for CTA `slot` of this group.  All CTAs of a cluster have index 0."""
        return 0 if self.run.has_clusters else slot

    def each_slot(self, warps: Lanes, act: Callable[[SharedRaces, int, Lanes], object]) -> None:
        """Calls `act` with the race detector, if there is one, for each of its slots that has some of `warps`: with the
        slot, and the numbers of these warps in it."""
        if self.races is not None:
            slots, slot_warps = np.divmod(np.unique(warps), self.race_warps)
            for slot in np.unique(slots):
                act(self.races, int(slot), slot_warps[slots == slot])

    def order_lanes(self, lanes: Lanes) -> None:
        """Records that `lanes` ran an instruction that orders the lanes of a warp among each other."""
        if self.lane_stores is not None:
            self.lane_stores.order(lanes)

    def all_lanes(self) -> Lanes:
        """Returns the lanes of all threads that have not ended."""
        return np.flatnonzero(self.alive)

    def live(self, place: int) -> frozenset[int]:
        """Returns the registers that are live at the instruction number `place`."""
        return self.program.flow.live.get(place, frozenset())

    def pieces(self, lanes: Lanes, grain: int) -> Lanes:
        """Returns for each lane the number of its warp (`grain` 32) or of its warpgroup (`grain` 128)."""
        if grain == 32:
            return lanes >> 5
        slots, lane_offsets = np.divmod(lanes, self.lanes_per_cta)
        warpgroup_ids: Lanes = slots * self.pieces_per_cta + (lane_offsets >> 7)
        return warpgroup_ids

    def whole(self, lanes: Lanes, grain: int) -> bool:
        """Returns whether `lanes` are complete warps (`grain` 32) or warpgroups (`grain` 128).  Ended lanes are
        ignored."""
        if len(lanes) == int(np.count_nonzero(self.alive)):
            return True
        cache_key = f"alive {grain}"
        if cache_key not in self._specials:
            self._specials[cache_key] = np.bincount(self.pieces(self.all_lanes(), grain))
        lane_counts = np.bincount(self.pieces(lanes, grain))
        return bool(((lane_counts == 0) | (lane_counts == self._specials[cache_key][: len(lane_counts)])).all())

    def end(self, lanes: Lanes) -> None:
        """Marks the threads `lanes` as ended."""
        self.alive[lanes] = False
        for cache_key in ("alive 32", "alive 128"):
            self._specials.pop(cache_key, None)

    def time(self, name: str) -> Any:
        """Returns the number of basic blocks that have run, as a clock.  It grows, but its rate means nothing."""
        step_count = self.run.steps
        return np.uint64(step_count) if name in ("clock64", "globaltimer") else np.uint32(step_count % (1 << 32))

    def special(self, name: str, lanes: Lanes, slots: Lanes) -> Any:
        """Returns the value of the special register `name` for `lanes`.  `slots` gives the CTA of each lane."""
        register_name, _, axis_name = name.partition(".")
        axis, cluster = "xyz".index(axis_name), self.run.cluster
        clusters: SizeTriple = tuple(map(operator.floordiv, self.grid, cluster))
        sizes = {"ntid": self.block, "nctaid": self.grid, "cluster_nctaid": cluster, "nclusterid": clusters}
        values = {
            "nwarpid": self.lanes_per_cta // 32,
            "nsmid": SMS,
            "gridid": 0,
            "cluster_nctarank": math.prod(cluster),
            "dynamic_smem_size": self.run.dynamic_shared,
            "total_smem_size": self.shared_size,
        }
        if register_name in sizes or register_name in values:
            return np.uint32(sizes[register_name][axis] if register_name in sizes else values[register_name])
        if name == "is_explicit_cluster":
            return np.bool_(self.run.has_clusters)
        lane_offsets = lanes % self.lanes_per_cta
        if name == "laneid":
            return (lane_offsets & 31).astype(np.uint32)
        if name == "warpid":
            return _scalar_if_same(lane_offsets >> 5)
        if name.startswith("lanemask_"):
            return _lane_mask(name.removeprefix("lanemask_"), (lane_offsets & 31).astype(np.uint32))
        if register_name == "tid":
            return _axis(lane_offsets, self.block, axis).astype(np.uint32)
        return _scalar_if_same(self._of_cta(register_name, axis, np.asarray(self.ctas)[slots]))

    def _of_cta(self, name: str, axis: int, ctas: Lanes) -> Lanes:
        cluster = self.run.cluster
        if name == "smid":
            return ctas % SMS
        if name == "ctaid":
            return _axis(ctas, self.grid, axis)
        if name == "clusterid":
            return _axis(ctas, self.grid, axis) // cluster[axis]
        x, y, z = position = [_axis(ctas, self.grid, index) % size for index, size in enumerate(cluster)]
        if name == "cluster_ctaid":
            return position[axis]
        if name == "cluster_ctarank":
            rank: Lanes = x + cluster[0] * (y + cluster[1] * z)
            return rank
        raise PtxError(f"PTX: expected a special register that is known, got %{name}")


def _axis(numbers: Lanes, sizes: SizeTriple, axis: int) -> Lanes:
    coordinates: Lanes = numbers // math.prod(sizes[:axis]) % sizes[axis]
    return coordinates


def _scalar_if_same(values: Lanes) -> Any:
    words = values.astype(np.uint32)
    return words[0] if (words == words[0]).all() else words


def _lane_mask(kind: str, lane: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    own = np.uint32(1) << lane
    below = own - np.uint32(1)
    return {"eq": own, "lt": below, "le": below | own, "gt": ~(below | own), "ge": ~below}[kind]

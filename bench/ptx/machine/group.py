"""CTAs that run at once: their shared memory, what they wait for, and what the lanes may ask about themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.text.syntax import PtxError

if TYPE_CHECKING:
    from rooflab.bench.ptx.machine.context import Context
    from rooflab.bench.ptx.machine.run import Run
    from rooflab.bench.ptx.machine.waiting import Waiting
    from rooflab.bench.ptx.program import Program
    from rooflab.bench.ptx.races.map_order import MapOrder
    from rooflab.bench.ptx.races.shared_races import SharedRaces

Triple = tuple[int, int, int]
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1 << 60, 2 << 60, 3 << 60
"""Generic addresses of the spaces that are not global memory; none of them is an address of a process."""
RANK_SHIFT = 24
"""A shared::cluster address is the CTA's rank plus one above these bits; 0 there is the CTA's own memory."""
POISON = 0xFF
"""What memory holds that nobody has written: NaN in every floating type."""


class Group:
    """The CTAs `ctas` (numbers within the grid) of a launch, running at once; a cluster, or many that share nothing."""

    def __init__(self, run: Run, ctas: list[int]):
        self.run = run
        self.program: Program = run.program
        self.memory = run.memory
        self.ctas = ctas
        self.block, self.grid = run.block, run.grid
        threads = self.block[0] * self.block[1] * self.block[2]
        self.threads_per_cta = threads
        self.lanes_per_cta = -(-threads // 32) * 32
        self.pieces_per_cta = -(-self.lanes_per_cta // 128)
        self.program_size = self.program.size
        self.shared_size = run.shared_size
        self.shared: npt.NDArray[np.uint8] = np.full(len(ctas) * self.shared_size, POISON, np.uint8)
        self.views = {width: self.shared.view(dtype) for width, dtype in _WIDE.items()}
        """Shared memory by access width."""
        self.written = np.zeros(len(self.shared), bool) if run.checks.uninitialised else None
        self.local: npt.NDArray[np.uint8] | None = None
        self.local_written: npt.NDArray[np.bool_] | None = None
        lanes = np.arange(len(ctas) * self.lanes_per_cta)
        self.alive = lanes % self.lanes_per_cta < threads
        self.race_warps = len(lanes) // 32 if run.has_clusters else self.lanes_per_cta // 32
        """Warps of a slot of the race detector: a CTA's, or a cluster's, whose CTAs reach each other's memory."""
        self.race_bytes = len(self.shared) if run.has_clusters else self.shared_size
        """Bytes of shared memory of such a slot."""
        self.races: SharedRaces | None = None
        self.maps: MapOrder | None = None
        self.waiting: Waiting
        self.accumulators: dict[int, Any] = {}
        """Chains of wgmmas, by their buffer."""
        self.warpgroups: dict[int, Any] = {}
        """Groups of wgmmas, by warpgroup."""
        self._specials: dict[str, Any] = {}
        self._live: dict[int, list[int]] = {}

    def race_slot(self, slot: int) -> int:
        """The race detector's slot of the CTA in `slot`."""
        return 0 if self.run.has_clusters else slot

    def all_lanes(self) -> npt.NDArray[np.int64]:
        """The lanes of all its threads."""
        return np.flatnonzero(self.alive)

    def live(self, place: int) -> list[int]:
        """Registers that a block at `place` needs from before."""
        if place not in self._live:
            self._live[place] = sorted(self.program.flow.live.get(place, ()))
        return self._live[place]

    def pieces(self, lanes: npt.NDArray[np.int64], grain: int) -> npt.NDArray[np.int64]:
        """Number of the warp or warpgroup of each lane."""
        if grain == 32:
            return lanes >> 5
        slots, inside = np.divmod(lanes, self.lanes_per_cta)
        found: npt.NDArray[np.int64] = slots * self.pieces_per_cta + (inside >> 7)
        return found

    def whole(self, lanes: npt.NDArray[np.int64], grain: int) -> bool:
        """Whether every warp (32) or warpgroup (128) of `lanes` has all its threads there that have not ended."""
        if len(lanes) == int(np.count_nonzero(self.alive)):
            return True
        key = f"alive {grain}"
        if key not in self._specials:
            self._specials[key] = np.bincount(self.pieces(self.all_lanes(), grain))
        own = np.bincount(self.pieces(lanes, grain))
        return bool(((own == 0) | (own == self._specials[key][: len(own)])).all())

    def end(self, lanes: npt.NDArray[np.int64]) -> None:
        """These threads have ended."""
        self.alive[lanes] = False
        for key in ("alive 32", "alive 128"):
            self._specials.pop(key, None)

    def time(self, name: str) -> Any:
        """A clock that counts steps: only that it grows means something."""
        value = self.run.steps
        return np.uint64(value) if name in ("clock64", "globaltimer") else np.uint32(value % (1 << 32))

    def special(self, name: str, context: Context) -> Any:
        """The value of a special register for the lanes of a context."""
        if (fixed := self._fixed(name)) is not None:
            return fixed
        inside = context.lanes % self.lanes_per_cta
        if name == "laneid":
            return (inside & 31).astype(np.uint32)
        if name == "warpid":
            return _scalar_if_same((inside >> 5).astype(np.uint32))
        if name.startswith("lanemask_"):
            return _lane_mask(name.removeprefix("lanemask_"), (inside & 31).astype(np.uint64))
        base, _, axis = name.partition(".")
        if base == "tid":
            return _axis(inside, self.block, axis)
        return self._of_cta(base, axis, context)

    def _of_cta(self, base: str, axis: str, context: Context) -> Any:
        numbers = np.asarray(self.ctas)[context.slots]
        cluster = self.run.cluster
        if base == "ctaid":
            return _scalar_if_same(_axis(numbers, self.grid, axis))
        place = [
            numbers % self.grid[0],
            numbers // self.grid[0] % self.grid[1],
            numbers // self.grid[0] // self.grid[1],
        ]
        within = [where % size for where, size in zip(place, cluster, strict=True)]
        if base == "cluster_ctaid":
            return _scalar_if_same(within["xyz".index(axis)].astype(np.uint32))
        if base == "cluster_ctarank":
            rank = within[0] + cluster[0] * (within[1] + cluster[1] * within[2])
            return _scalar_if_same(rank.astype(np.uint32))
        if base == "clusterid":
            index = "xyz".index(axis)
            return _scalar_if_same((place[index] // cluster[index]).astype(np.uint32))
        if base == "smid":
            return _scalar_if_same((numbers % self.run.sms).astype(np.uint32))
        raise PtxError(f"PTX: expected a special register that is known, got %{base}")

    def _fixed(self, name: str) -> Any:
        base, _, axis = name.partition(".")
        sizes: dict[str, Triple] = {
            "ntid": self.block,
            "nctaid": self.grid,
            "cluster_nctaid": self.run.cluster,
            "nclusterid": tuple(size // own for size, own in zip(self.grid, self.run.cluster, strict=True)),  # type: ignore[dict-item]
        }
        if base in sizes:
            return np.uint32(sizes[base]["xyz".index(axis)])
        cluster = self.run.cluster
        numbers = {
            "nwarpid": self.lanes_per_cta // 32,
            "nsmid": self.run.sms,
            "gridid": 0,
            "cluster_nctarank": cluster[0] * cluster[1] * cluster[2],
            "dynamic_smem_size": self.run.dynamic_shared,
            "total_smem_size": self.shared_size,
        }
        if name == "is_explicit_cluster":
            return np.bool_(cluster != (1, 1, 1))
        return np.uint32(numbers[name]) if name in numbers else None

    def address_of(self, name: str) -> int:
        """A variable's or parameter's address in its own space."""
        return self.run.address_of(name)


_WIDE = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def _axis(numbers: npt.NDArray[np.int64], sizes: Triple, axis: str) -> npt.NDArray[np.uint32]:
    x, y, _ = sizes
    if axis == "x":
        return (numbers % x).astype(np.uint32)
    if axis == "y":
        return (numbers // x % y).astype(np.uint32)
    return (numbers // (x * y)).astype(np.uint32)


def _scalar_if_same(values: npt.NDArray[np.uint32]) -> Any:
    return values[0] if (values == values[0]).all() else values


def _lane_mask(kind: str, lane: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    one, all_ = np.uint64(1), np.uint64(0xFFFFFFFF)
    below = (one << lane) - one
    masks = {
        "eq": one << lane,
        "lt": below,
        "le": below | one << lane,
        "gt": all_ & ~(below | one << lane),
        "ge": all_ & ~below,
    }
    return masks[kind].astype(np.uint32)

"""The tiles of `gemm/multicast` and `gemm_fp8/multicast`, and what a CTA needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tensor_map import BOX_ROWS, ROW_BYTES
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.tuning import BF16, REGISTERS_PER_SM, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

ADDRESS_REGISTERS = 24
"""For addresses, descriptors and loop counters, in addition to the accumulators."""


@dataclass(frozen=True)
class ClusterTile:
    """Tile sizes, the ring, and the cluster."""

    consumers: int
    """Warpgroups of 64 rows each."""
    block_n: int
    """Columns of a tile."""
    stages: int
    """Slots of the ring, with 128 bytes along K each."""
    group_m: int
    """Row panels of tiles that share their columns of b in L2."""
    staged: int
    """Boxes of 64 columns that a consumer has in shared memory for its stores."""
    cluster: int
    """CTAs that share their columns of b."""

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return BOX_ROWS * self.consumers

    @property
    def shared_bytes(self) -> int:
        """The ring, the boxes that are stored, and the barriers."""
        boxes = self.stages * (self.consumers + self.block_n // BOX_ROWS) + self.consumers * self.staged
        return boxes * BOX_ROWS * ROW_BYTES + (2 * self.stages + self.consumers * self.staged) * BARRIER_BYTES

    def clusters(self, M: int, N: int) -> int:
        """Tiles of clusters."""
        return cdiv(M, self.block_m * self.cluster) * cdiv(N, self.block_n)

    @property
    def divides(self) -> bool:
        """Whether CTAs share the columns evenly, and stores take whole rounds of the staged boxes."""
        boxes = self.block_n // BOX_ROWS
        return boxes % self.cluster == 0 and boxes % self.staged == 0


def cluster_tuning(
    consumers: tuple[int, ...],
    columns: tuple[int, ...],
    staged: tuple[int, ...],
    heuristic: Callable[..., ClusterTile],
    *,
    itemsize: int,
    accumulators: int,
) -> Tuning:
    """These tiles with rings of several depths, with a cluster and without, for operands of `itemsize` bytes and
    `accumulators` fp32 values per output."""

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[ClusterTile, ...]:
        sizes = itertools.product(consumers, columns, (3, 4, 5, 6), (8, 16), staged, (1, 2))
        return tuple(itertools.starmap(ClusterTile, sizes))

    def footprint(config: ClusterTile, case: Case, scheme: Scheme = BF16) -> Footprint:
        """Mean registers of the CTA's threads; the ring, the staged boxes and the barriers."""
        step, threads = ROW_BYTES // itemsize, 128 * (config.consumers + 1)
        tiles = config.clusters(int(case["M"]), int(case["N"])) * config.cluster
        ctas = min(tiles, HOPPER_SMS)
        outputs = config.block_m * config.block_n
        return Footprint(
            threads=threads,
            registers=min(REGISTERS_PER_SM // threads // 8 * 8, accumulators * config.block_n // 2 + ADDRESS_REGISTERS),
            shared_bytes=config.shared_bytes,
            ctas=ctas,
            tensor_flops=2.0 * outputs * cdiv(int(case["K"]), step) * step * tiles / max(1, ctas),
        )

    def is_legal(config: ClusterTile, case: Case, scheme: Scheme = BF16) -> bool:
        """Whether a CTA fits, and boxes divide evenly."""
        return config.divides and footprint(config, case, scheme).fits

    return Tuning(ClusterTile, configs, heuristic, footprint, is_legal)

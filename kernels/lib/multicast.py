"""Holds host code of the `multicast` kernels of gemm and gemm_fp8: tiles, resources of a CTA, and the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tensor_map import BOX_ROWS, ROW_BYTES, CudaMap
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.tuning import BF16, Footprint, space
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.occupancy import HOPPER

SOURCE = (_cuda.LIB_FOLDER / "multicast.cu").read_text()
CLUSTER_CTAS = 2
"""The number of CTAs of a cluster, which share the same columns of `b`."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""Registers per thread of a consumer, by the number of consumers.  The producer's warpgroup has 24 per thread."""
ADDRESS_REGISTERS = 24
"""Registers per thread for addresses, descriptors and loop counters.  The accumulators come on top."""


@dataclass(frozen=True)
class ClusterTile:
    """Holds a config: tile sizes, slots of the shared-memory ring, the tile order, and buffers for output stores."""

    consumers: int
    """The number of consumer warpgroups, of 64 rows each."""
    block_n: int
    """The number of columns of a tile."""
    stages: int
    """The number of slots of the ring; a slot holds 128 bytes along K."""
    group_m: int
    """The number of row panels of tiles that share their columns of `b` in L2."""
    staged: int
    """The number of boxes of 64 columns in shared memory that a consumer has for its stores."""

    @property
    def block_m(self) -> int:
        """Returns the number of rows of a tile."""
        return BOX_ROWS * self.consumers

    @property
    def shared_bytes(self) -> int:
        """Returns the shared memory of a CTA in bytes: the ring, the buffers for output stores, and the barriers."""
        box_count = self.stages * (self.consumers + self.block_n // BOX_ROWS) + self.consumers * self.staged
        return box_count * BOX_ROWS * ROW_BYTES + (2 * self.stages + self.consumers * self.staged) * BARRIER_BYTES

    def clusters(self, M: int, N: int) -> int:
        """Returns the number of cluster tiles of an `[M, N]` result.  In a cluster tile, each CTA has one tile."""
        return cdiv(M, self.block_m * CLUSTER_CTAS) * cdiv(N, self.block_n)


tiles = partial(space, ClusterTile, stages=(3, 4, 5, 6), group_m=(8, 16), staged=(1, 2))
"""Makes configs for given consumers and columns, with rings of three to six slots and one or two staged boxes."""


def footprint(config: ClusterTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the average registers of a thread, and the shared memory of a CTA.  Each output takes an fp32 register.
    With fp8 inputs, an output takes a second register, for another fp32 sum."""
    value_bytes, cta_threads = scheme.activation.itemsize, 128 * (config.consumers + 1)
    acc_registers = config.block_n // 2 * (2 if value_bytes == 1 else 1)
    tiles = config.clusters(int(case["M"]), int(case["N"])) * CLUSTER_CTAS
    ctas, k_step = min(tiles, HOPPER_SMS), ROW_BYTES // value_bytes
    flops = 2.0 * config.block_m * config.block_n * cdiv(int(case["K"]), k_step) * k_step
    return Footprint(
        threads=cta_threads,
        registers=min(HOPPER.registers // cta_threads // 8 * 8, acc_registers + ADDRESS_REGISTERS),
        shared_bytes=config.shared_bytes,
        ctas=ctas,
        tensor_flops=flops * tiles / max(1, ctas),
    )


@cache
def _kernel(
    kind: str, config: ClusterTile, along_k: tuple[bool, bool], bias: bool, residual: bool, block_scales: bool
) -> _cuda.CudaKernel:
    compile_options = _cuda.macros(
        FP8=kind == "fp8",
        HALF=kind == "fp16",
        CONSUMERS=config.consumers,
        REGISTERS=CONSUMER_REGISTERS[config.consumers],
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        GROUP_M=max(1, config.group_m // CLUSTER_CTAS),
        STAGED=config.staged,
        A_ALONG_K=along_k[0],
        B_ALONG_K=along_k[1],
        BIAS=bias,
        RESIDUAL=residual,
        BLOCK_SCALES=block_scales,
    )
    return _cuda.load(SOURCE, "multicast", options=compile_options)


def launch(
    kind: str,
    config: ClusterTile,
    maps: Sequence[CudaMap],
    sizes: tuple[int, int, int],
    *,
    along_k: tuple[bool, bool] = (True, True),
    bias: torch.Tensor | None = None,
    residual: bool = False,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    block_scales: bool = False,
) -> None:
    """Launches the kernel `multicast` of gemm or gemm_fp8.

    `maps` are the tensor maps of `a`, `b`, the output and the residual (or the output again).  `kind` is `bf16`, `fp16`
    or `fp8`.  `sizes` is (M, N, K).  `along_k` tells whether `a` and `b` are contiguous along K.  `scales` holds their
    fp8 scales."""
    M, N, _ = sizes
    kernel = _kernel(kind, config, along_k, bias is not None, residual, block_scales)
    cluster_count = min(config.clusters(M, N), max(1, sm_count(maps[0].base.device) // CLUSTER_CTAS))
    strides = [stride for scale in scales for stride in scale.stride()] if scales and block_scales else [0] * 4
    kernel(
        (cluster_count * CLUSTER_CTAS,),
        (128 * (config.consumers + 1),),
        *maps,
        bias,
        *(scales or (None, None)),
        *map(np.int32, sizes),
        *map(np.int64, strides),
        shared_bytes=config.shared_bytes,
    )

"""Implements the kernel `multicast` in CUDA C++.  Two CTAs of a cluster load their common columns of `b` once.

The kernel improves on `promoted_ws`.  There a tile of 192 x 128 needs 53 bytes per clock from L2, more than any
measured rate of Hopper's L2.  Here each CTA loads half of the tile of `b`, and TMA writes it to both CTAs (multicast,
as in DeepGEMM).  So a CTA reads only 43 bytes per clock.

The device code is `lib/multicast.cu`.  One consumer warpgroup adds its product in fp32, with the block scales, while
other consumers multiply.  The kernel was not measured on a GPU.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rooflab.kernels._tensor_map import CudaMap
from rooflab.kernels.gemm._operands import Stored, epilogue_alone, stored_operands, stored_output
from rooflab.kernels.gemm_fp8._operands import block_scaled, tiles_traffic, why_not_operands
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import multicast as shared
from rooflab.kernels.lib.multicast import ClusterTile
from rooflab.kernels.tuning import Defaults, Tuning
from rooflab.reference.spec import Arguments

BLOCK_N = 128
"""The number of columns of a tile, which share a block scale."""
_TILE_M128, _TILE_M192 = ClusterTile(2, BLOCK_N, 6, 16, 2), ClusterTile(3, BLOCK_N, 4, 8, 2)
DEFAULTS = Defaults((({"M": 2048}, _TILE_M128), ({"N": 2112}, _TILE_M192), ({"N": 7168}, _TILE_M128), ({}, _TILE_M192)))
"""The default tiles.  Three consumers request a tenth less from L2; two fill the last wave better in some cases."""
TUNING = Tuning(ClusterTile, shared.tiles(consumers=(2, 3), block_n=(BLOCK_N,)), DEFAULTS, shared.footprint)


def stored(of: Arguments) -> tuple[Stored, ...]:
    """Describes `a`, `b.mT` and `c` as contiguous rows for TMA.  Raises `ValueError` if TMA cannot store `c`."""
    return *stored_operands(of.a, of.b), stored_output(of.c)


@kernel(
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("cupy",),
    unsupported=partial(why_not_operands, stores=True),
    aligned=("a", "b"),
    empty=epilogue_alone,
    bind=stored,
    traffic=tiles_traffic,
    tuning=TUNING,
    over="promoted_ws",
    shows={
        "M=2048,N=28672,K=4096,scales={tensor|block},bias=false": (
            "threads in (384, 512) and ctas % 2 == 0 and not warnings and len(products) == 1; "
            "loop.wgmma == 4 and loop.tma == loop.spill_load == 0 and max(loop.FADD, loop.FFMA) >= 64; "
            "UTMALDG_2D_MULTICAST == 1 and UTMALDG_2D == threads // 128"
        )
    },
)
def multicast(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    fast_accum: bool,
    config: ClusterTile,
    bound: tuple[Stored, ...],
) -> None:
    """Computes the same result as the kernel `promoted`.  TMA multicasts `b` to the two CTAs of a cluster."""
    a_map, b_map, c_map = (CudaMap(base_tensor, *rows[:3]) for base_tensor, rows in zip((a, b, c), bound, strict=True))
    shared.launch(
        "fp8",
        config,
        [a_map, b_map, c_map, c_map],
        (*a.shape[:1], *b.shape[1:], *a.shape[1:]),
        bias=bias,
        scales=(a_scale, b_scale),
        block_scales=block_scaled(a_scale),
    )

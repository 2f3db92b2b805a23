"""Over promoted_ws, in CUDA C++: a cluster of two CTAs loads the columns of b that both need once.

A tile of 192 x 128 asks L2 for 40 KB for 128 of K, which are 53 bytes per clock and SM at the rate of the tensor cores:
more than anything measured for Hopper's L2.  Here two CTAs with tiles one below the other each load half of b's tile
for both (TMA's multicast, as DeepGEMM does): 32 KB, 43 bytes per clock.  The device code is `lib/multicast.cu`; a
consumer waits for its product of 128 of K and adds it in fp32, with its block scales, while others multiply.

`cluster=1` is the same kernel without multicast, so that a GPU can judge it alone.  Unmeasured on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tensor_map import CudaMap
from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm_fp8 import _tiles
from rooflab.kernels.gemm_fp8._operands import TMA_ALIGNMENT, block_scaled
from rooflab.kernels.gemm_fp8._tiles import traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import multicast as shared
from rooflab.kernels.lib.multicast import ClusterTile, cluster_tuning
from rooflab.kernels.tuning import BF16
from rooflab.reference.spec import Arguments, Case, Scheme

BLOCK_N = 128
"""Columns of a tile: those of one block scale."""


def three_or_two(case: Case, scheme: Scheme = BF16) -> ClusterTile:
    """Three consumers, which ask L2 for a tenth less, unless the busiest SM multiplies over 5% fewer rows with two."""
    M, N = int(case["M"]), int(case["N"])
    three, two = ClusterTile(3, BLOCK_N, 4, 8, 2, 2), ClusterTile(2, BLOCK_N, 6, 16, 2, 2)
    turns = [config.consumers * cdiv(config.clusters(M, N), HOPPER_SMS // 2) for config in (three, two)]
    return three if turns[0] <= 1.05 * turns[1] else two


TUNING = cluster_tuning((2, 3), (BLOCK_N,), (1, 2), three_or_two, itemsize=1, accumulators=2)
"""A consumer has a product of 128 of K, and its sum."""


def unsupported(inputs: Arguments) -> str | None:
    """Why TMA cannot read these operands or store the result, or None."""
    a, b = inputs.a, inputs.b
    reason = _tiles.unsupported(inputs)
    if reason is None and a.shape[0] > 1 and a.numel() and 2 * b.shape[1] % TMA_ALIGNMENT:
        wanted = f"N of whole {TMA_ALIGNMENT} bytes of the result, so that TMA can store its rows"
        reason = f"b: expected {wanted}, got {b.shape[1]}; gemm_fp8/promoted_ws takes any"
    return reason


def _map(matrix: torch.Tensor) -> CudaMap:
    """The map of a matrix whose rows are contiguous; the stride of a single row has no meaning."""
    rows, columns = matrix.shape
    whole = TMA_ALIGNMENT // matrix.element_size()
    return CudaMap(matrix, rows, columns, matrix.stride(0) if rows > 1 else cdiv(columns, whole) * whole)


def check_out(of: Arguments) -> None:
    """Raises `ValueError` on a `c` that TMA cannot store."""
    c, kept = of.c, _map(of.c)
    if 2 * kept.stride % TMA_ALIGNMENT or (not c.is_meta and c.data_ptr() % TMA_ALIGNMENT):
        wanted = "an address and rows at multiples of 16 bytes for TMA"
        raise ValueError(f"out: expected {wanted}, got strides {c.stride()}; gemm_fp8/promoted_ws takes any")


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), unsupported=unsupported, aligned=("a", "b"),
    empty=epilogue_alone, bind=check_out, traffic=traffic, tuning=TUNING,
    over="promoted_ws", shows={
        "M=2048,N=28672,K=4096,scales=tensor,bias=false,fast_accum=true": (
            "threads in (384, 512) and ctas % 2 == 0 and not warnings and len(products) == 1; "
            "loop.wgmma == 4 and loop.tma == loop.spill_load == 0 and loop.FADD >= 64; "
            "UTMALDG_2D_MULTICAST == 1 and UTMALDG_2D == threads // 128"
        ),
        "M=2048,N=28672,K=4096,scales=block,bias=false": (
            "threads in (384, 512) and ctas % 2 == 0 and not warnings and len(products) == 1; "
            "loop.wgmma == 4 and loop.tma == loop.spill_load == 0 and loop.FFMA >= 64; "
            "UTMALDG_2D_MULTICAST == 1 and UTMALDG_2D == threads // 128"
        ),
    },
)  # fmt: skip
def multicast(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, c: Tensor, *,
    fast_accum: bool, config: ClusterTile, bound: None,
) -> None:  # fmt: skip
    """The sums of `promoted`; b is multicast in a cluster."""
    kept = _map(c)
    shared.launch(
        "fp8", config, [_map(a), _map(b.mT), kept, kept], (*a.shape[:1], *b.shape[1:], *a.shape[1:]),
        bias=bias, scales=(a_scale, b_scale), block_scales=block_scaled(a_scale),
    )  # fmt: skip

"""Over persistent: one warp only loads, and two warpgroups only multiply and activate.

The producer runs ahead through a ring in shared memory into the next tile, while the last tile is activated and
stored.  The consumers share the tile of gate and up; each has half of the rows of A and its own accumulator.  Design
and sources are those of gemm's cooperative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm_silu_and_mul._configs import COOPERATIVE, PairRing
from rooflab.kernels.gemm_silu_and_mul._coop_device import _gemm
from rooflab.kernels.gemm_silu_and_mul._maps import stored, why_no_maps, zeros
from rooflab.kernels.gemm_silu_and_mul._tiled import traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALVES
from rooflab.reference.spec import Arguments

KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def by_maps(of: Arguments) -> Any:
    """Of a layout: what makes the maps of a, the weight and out, the grid, and sizes."""
    config = of.config
    a, weight, out = stored(of)
    boxes = ((a, config.block_m // 2, config.block_k), (out, config.block_m // 2, config.block_i))
    rows = weight._replace(transposed=False), config.block_i, config.block_k
    kind = KINDS[of.a.dtype]
    maps = [matrix.map(high, wide, TensorDescriptor, kind) for matrix, high, wide in (boxes[0], rows, boxes[1])]
    (M, K), I = of.a.shape, of.out.shape[1]
    grid = (min(cdiv(M, config.block_m) * cdiv(I, config.block_i), sm_count(of.a.device)),)
    return *maps, grid, (M, I, K)


@kernel(
    backend="gluon", min_sm=90, dtypes={"a": HALVES}, instead="gemm_silu_and_mul/persistent",
    unsupported=why_no_maps, aligned=("a", "b"), empty=zeros, bind=by_maps,
    traffic=traffic, tuning=COOPERATIVE,
)  # fmt: skip
def cooperative(a: Tensor, b: Tensor, out: Tensor, *, config: PairRing, bound: Any) -> None:
    """silu(a gate) * (a up) on Hopper's tensor cores, summed in fp32 and rounded once."""
    a_map, b_map, out_map, grid, sizes = bound
    _gemm[grid](a_map(a), b_map(b), out_map(out), *sizes, num_warps=4, **config.launch_arguments)

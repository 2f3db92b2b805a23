"""Over warp_specialized, in Gluon: consumers work independently, and no warp waits for a store.

One warp issues the TMA loads through a ring in shared memory and runs ahead into the next tile while the last one is
stored.  Two warpgroups share a tile of B; each has half of the rows of A, its own accumulator, and always one product
in flight: it frees a slot after the next product has started, so the tensor cores never wait.  Each half of a finished
tile is staged in shared memory and stored by TMA; a wait for the store comes only when that memory is needed again.
TMA loads a residual into the same memory during the products.  Consumers hold most registers (setmaxnreg).  Design:
CUTLASS's cooperative warp-specialized GEMM (NVIDIA, CUTLASS 3.x, example 48) and ThunderKittens (Spector et al.,
2024); CUTLASS also multicasts within a cluster, which Gluon 3.6 cannot: `multicast` does.

Tried, predicted, not built: docs/notes/gemm.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._coop_device import _gemm
from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm._ring_configs import COOPERATIVE, RingTile
from rooflab.kernels.gemm._tiled import traffic
from rooflab.kernels.gemm._tma import stored_as, stored_operands, stored_output, why_not_moved
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments

KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def by_maps(of: Arguments) -> Any:
    """Of a layout: what makes the maps of a, b, c and the residual, the grid, sizes, and constants."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    (a, b), c = stored_operands(of.a, of.b), stored_output(of.c, "pipelined")
    residual = None if of.residual is None else stored_as(of.residual, False)
    half = config.block_m if config.turns else config.block_m // 2
    grid = (min(cdiv(M, config.block_m) * cdiv(N, config.block_n), sm_count(of.a.device)),)
    maps = [
        matrix and matrix.map(rows, columns, TensorDescriptor, KINDS[of.a.dtype])
        for matrix, rows, columns in (
            (a, half, config.block_k), (b, config.block_k, config.block_n),
            (c, half, config.store_n), (residual, half, config.store_n),
        )
    ]  # fmt: skip
    transposed = {"A_TRANSPOSED": a.transposed, "B_TRANSPOSED": b.transposed}
    return *maps, grid, (M, N, K), {**transposed, "num_warps": 4, **config.launch_arguments}


@kernel(
    backend="gluon", min_sm=90, unsupported=why_not_moved, aligned=("a", "b", "residual"), empty=epilogue_alone,
    bind=by_maps, traffic=traffic, tuning=COOPERATIVE,
)  # fmt: skip
def cooperative(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *,
    residual: Tensor | None, precision: str, config: RingTile, bound: Any,
) -> None:  # fmt: skip
    """a b + bias + residual on Hopper's tensor cores, accumulated in fp32 and rounded once."""
    a_map, b_map, c_map, residual_map, grid, sizes, constants = bound
    added = None if residual is None else residual_map(residual)
    _gemm[grid](a_map(a), b_map(b), bias, added, c_map(c), *sizes, **constants)

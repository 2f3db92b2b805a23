"""Over tma: persistent CTAs walk over the tiles of all experts; one warp only loads, two warpgroups only multiply.

The producer runs ahead through a ring in shared memory into the next tile, of any expert, while the last tile is
stored; the consumers share a tile of B, each with half of the tile's rows.  A half without rows of the expert is
neither loaded nor multiplied, so a group's last tile is padded to 64 rows, not 128.  Only existing tiles are counted,
so CTAs share them evenly; a grid that the host bounds cannot do that.  TMA stores a tile if all its rows are the
expert's.  Design: gemm's cooperative; CUTLASS's grouped GEMM (NVIDIA, "CUTLASS 3.x", example 57) and DeepGEMM's grouped
layouts (DeepSeek, 2025), which pad each group to whole tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels._tma import ALIGNMENT
from rooflab.kernels.gemm._tma import Stored, stored_as
from rooflab.kernels.gemm_grouped._configs import COOPERATIVE, GroupedRing, panels
from rooflab.kernels.gemm_grouped._coop_device import _gemm
from rooflab.kernels.gemm_grouped._maps import stored, stored_experts, why_no_maps
from rooflab.kernels.gemm_grouped._operands import zeros
from rooflab.kernels.gemm_grouped._tiles import traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALVES
from rooflab.reference.spec import Arguments

LEAST_EXPERTS = 32
"""Least experts that are looked up together: one per thread of a warp."""
KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def unsupported(inputs: Arguments) -> str | None:
    """Why wgmma or TMA cannot take the operands, or None."""
    a, b = inputs.a, inputs.b
    reason = why_no_maps(inputs)
    if reason or not a.numel() or not b.numel():
        return reason
    experts = stored_experts(b)
    if experts is not None and experts.strides[0] != experts.shape[1] * experts.strides[1]:
        return f"b: expected experts that follow one another in memory, got {b.stride()}; gemm_grouped/tma takes any"
    size = b.shape[2] * b.element_size()
    if a.shape[0] > 1 and size % ALIGNMENT:
        return (
            f"b: expected N of whole {ALIGNMENT} bytes, so that TMA can store the result's rows, got {size} bytes; "
            "gemm_grouped/tma takes any"
        )
    return None


def by_maps(of: Arguments) -> Any:
    """Of a layout: what makes the maps of a, b and out, the grid, a stride and sizes, and constants.

    Raises `ValueError` if TMA cannot store `out`.
    """
    (T, K), (E, _, N), config = of.a.shape, of.b.shape, of.config
    (a, experts), out = stored(of.a, of.b), stored_as(of.out, False)
    if out is None:
        raise ValueError(
            f"out: expected an address and row stride of whole {ALIGNMENT} bytes for TMA, got a stride of "
            f"{of.out.stride(0) * of.out.element_size()} bytes; gemm_grouped/tma takes any"
        )
    half = config.block_m // 2
    matrices = (
        (a, half, config.block_k),
        (Stored(E * N, K, experts.strides[1], False), config.block_n, config.block_k),
        (out, half, config.store_n),
    )
    maps = [stored.map(rows, columns, TensorDescriptor, KINDS[of.a.dtype]) for stored, rows, columns in matrices]
    grid = (min(panels(T, E, config.block_m) * cdiv(N, config.block_n), sm_count(of.a.device)),)
    experts_at_once = max(LEAST_EXPERTS, next_power_of_2(E))
    constants = {"BLOCK_E": experts_at_once, "num_warps": 4, **config.launch_arguments}
    return *maps, grid, (of.out.stride(0), E, N, K), constants


@kernel(
    backend="gluon", min_sm=90, dtypes={"a": HALVES}, instead="gemm_grouped/tma", unsupported=unsupported,
    aligned=("a", "b"), empty=zeros, bind=by_maps,
    traffic=traffic, tuning=COOPERATIVE,
)  # fmt: skip
def cooperative(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, *, config: GroupedRing, bound: Any) -> None:
    """Each expert's rows times its matrix on Hopper's tensor cores, summed in fp32 and rounded once."""
    a_map, b_map, out_map, grid, numbers, constants = bound
    _gemm[grid](a_map(a), b_map(b), offsets, out_map(out), out, *numbers, **constants)

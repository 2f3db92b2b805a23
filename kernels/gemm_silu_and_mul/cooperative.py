"""Over persistent: one warp only loads, and two warpgroups only multiply and activate.

The producer runs ahead through a ring in shared memory into the next tile, while the last tile is activated and
stored.  The consumers share the tile of gate and up; each has half of the rows of A and its own accumulator.  Design
and sources are those of gemm's cooperative.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import stages_that_fit
from rooflab.kernels.gemm_silu_and_mul._configs import least_work
from rooflab.kernels.gemm_silu_and_mul._coop_device import _gemm
from rooflab.kernels.gemm_silu_and_mul._maps import stored, why_no_maps, zeros
from rooflab.kernels.gemm_silu_and_mul._tiled import traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """A tile and the ring."""

    block_m: int
    """Each consumer takes half."""
    block_i: int
    """Columns of gate, and as many of up."""
    block_k: int
    stages: int
    """Slots of the ring."""
    group_m: int = 16
    """Row panels of tiles that share their columns of B in L2."""
    lead: int = 0
    """Steps of K that the first consumer is ahead of the second, so that one activates while the other multiplies; each
    step costs a slot of the ring, which both hold."""


THREADS = 384
"""Two consumers and the warpgroup of the producer warp, because setmaxnreg moves registers between warpgroups."""
CONSUMER_REGISTERS = 24
"""For addresses, descriptors and loop counters, in addition to the accumulator."""
MBARRIER_BYTES = 8
SWIZZLE_BYTES = 128
"""Bytes of a row in swizzled shared memory, so that wgmma's operands have no bank conflicts."""
KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
CANDIDATES = ((128, 128), (256, 64), (128, 64), (128, 32))
"""block_m and block_i."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles that two consumers can hold in registers, with rings of several depths."""
    depth = SWIZZLE_BYTES // scheme.activation.itemsize
    tiles = itertools.product((128, 256), (32, 64, 128), (depth // 2, depth), (4, 8, 16))
    return tuple(
        Config(block_m, block_i, block_k, stages, group_m, lead)
        for block_m, block_i, block_k, group_m in tiles
        for stages, lead in ((3, 0), (4, 0), (4, 1), (6, 0), (6, 2), (8, 0), (8, 4))
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """One fp32 accumulator per consumer; the ring, the staged result, and the mbarriers."""
    tiles = cdiv(int(case["M"]), config.block_m) * cdiv(int(case["I"]), config.block_i)
    outputs = config.block_m * 2 * config.block_i
    ctas = min(tiles, HOPPER_SMS)
    slot = (config.block_m + 2 * config.block_i) * config.block_k
    elements = config.stages * slot + config.block_m * config.block_i
    flops = 2.0 * outputs * cdiv(int(case["K"]), config.block_k) * config.block_k
    return Footprint(
        threads=THREADS,
        registers=outputs // 256 + CONSUMER_REGISTERS,
        shared_bytes=elements * scheme.activation.itemsize + 3 * config.stages * MBARRIER_BYTES,
        ctas=ctas,
        tensor_flops=flops * tiles / max(1, ctas),
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, and the ring has at least two slots more than the lead."""
    return footprint(config, case, scheme).fits and (config.lead == 0 or config.lead + 2 <= config.stages)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The one of `CANDIDATES` with the least work for the busiest SM, with as many slots as fit with the result."""

    def deepest(block_m: int, block_i: int) -> Config:
        stages = stages_that_fit(
            (block_m + 2 * block_i) * SWIZZLE_BYTES, block_m * block_i * scheme.activation.itemsize
        )
        return Config(block_m, block_i, SWIZZLE_BYTES // scheme.activation.itemsize, stages)

    return least_work([deepest(*candidate) for candidate in CANDIDATES], case)


def unsupported(inputs: Arguments) -> str | None:
    """Why wgmma or TMA cannot take the operands, or None."""
    if inputs.a.dtype == torch.float32:
        return "a: expected 16 bits for wgmma, got torch.float32; gemm_silu_and_mul/persistent takes it"
    return why_no_maps(inputs)


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
    backend="gluon", min_sm=90, unsupported=unsupported, aligned=("a", "b"), empty=zeros, bind=by_maps,
    traffic=traffic, tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def cooperative(a: Tensor, b: Tensor, out: Tensor, *, config: Config, bound: Any) -> None:
    """silu(a gate) * (a up) on Hopper's tensor cores, summed in fp32 and rounded once."""
    a_map, b_map, out_map, grid, sizes = bound
    _gemm[grid](a_map(a), b_map(b), out_map(out), *sizes, num_warps=4, **config.launch_arguments)

"""Over persistent: one warp only loads, and two warpgroups only multiply and activate.

The producer runs ahead through a ring in shared memory into the next tile, while the last tile is activated and
stored.  The consumers share the tile of gate and up; each has half of the rows of A and its own accumulator.  Design
and sources are those of gemm's cooperative.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._checks import output
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._layouts import layout_of
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import unchecked_map
from rooflab.kernels.gemm._tma import Stored
from rooflab.kernels.gemm_silu_and_mul._coop_device import _gemm
from rooflab.kernels.gemm_silu_and_mul._maps import least_work, stages_that_fit, stored, why_no_maps
from rooflab.kernels.gemm_silu_and_mul._operands import check_operands
from rooflab.kernels.gemm_silu_and_mul._tiled import config_of, traffic_of
from rooflab.kernels.registry import register
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


def why_not_taken(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why wgmma or TMA cannot take the operands, or None."""
    if a.dtype == torch.float32:
        return "a: expected 16 bits for wgmma, got torch.float32; gemm_silu_and_mul/persistent takes it"
    return why_no_maps(a, b)


def _map(matrix: Stored, rows: int, columns: int) -> TensorDescriptor:
    box = [rows, columns]
    layout = layout_of(tuple(box), KINDS[matrix.base.dtype])
    return unchecked_map(TensorDescriptor, matrix.base, [matrix.rows, matrix.columns], [matrix.stride, 1], box, layout)


@register(
    op="gemm_silu_and_mul", name="cooperative", role="optimized", backend="gluon", min_sm=90,
    unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b), traffic=traffic_of("cooperative"),
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def gemm_silu_and_mul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, config: Config | None = None
) -> torch.Tensor:
    """silu(a gate) * (a up) on Hopper's tensor cores, summed in fp32 and rounded once.

    a: (M, K); b: (K, 2 I), a transposed view of a weight with gate's rows before up's; fp16 or bf16; returns (M, I).
    K is contiguous in both; addresses and row strides, also of out, are whole 16 bytes.  Raises `ValueError` on other
    operands.
    """
    M, I, K = check_operands(a, b)
    out = output(out, (M, I), a)
    if not out.numel() or not K:
        return out.zero_()
    reason = why_not_taken(a, b)
    if reason:
        raise ValueError(reason)
    config = config or config_of("cooperative", a, b)
    a_stored, weight, out_stored = stored(a, b, out)
    tiles = cdiv(M, config.block_m) * cdiv(I, config.block_i)
    _gemm[(min(tiles, sm_count(a.device)),)](
        _map(a_stored, config.block_m // 2, config.block_k), _map(weight, config.block_i, config.block_k),
        _map(out_stored, config.block_m // 2, config.block_i), M, I, K,
        num_warps=4, **config.launch_arguments,
    )  # fmt: skip
    return out

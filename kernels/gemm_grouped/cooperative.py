"""Over tma: persistent CTAs walk over the tiles of all experts; one warp only loads, two warpgroups only multiply.

The producer runs ahead through a ring in shared memory into the next tile, of any expert, while the last tile is
stored; the consumers share a tile of B, each with half of the tile's rows.  A half without rows of the expert is
neither loaded nor multiplied, so a group's last tile is padded to 64 rows, not 128.  Only existing tiles are counted,
so CTAs share them evenly; a grid that the host bounds cannot do that.  TMA stores a tile if all its rows are the
expert's.  Design: gemm's cooperative; CUTLASS's grouped GEMM (NVIDIA, "CUTLASS 3.x", example 57) and DeepGEMM's grouped
layouts (DeepSeek, 2025), which pad each group to whole tiles.
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
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels._tma import ALIGNMENT, unchecked_map
from rooflab.kernels.gemm._tma import stored_as
from rooflab.kernels.gemm_grouped._coop_device import _gemm
from rooflab.kernels.gemm_grouped._maps import stored, stored_experts, why_no_maps
from rooflab.kernels.gemm_grouped._operands import check_operands
from rooflab.kernels.gemm_grouped._tiles import config_of, least_work, panels, stages_that_fit, traffic_of
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """A tile and the ring."""

    block_m: int
    """Each consumer takes half."""
    block_n: int
    block_k: int
    stages: int
    """Slots of the ring."""
    store_n: int
    """Columns of a finished tile that are staged at once: all, or half if the ring needs the memory."""
    group_m: int = 8
    """Row panels of an expert that share its columns of B in L2."""


THREADS = 384
"""Two consumers and the warpgroup of the producer warp, because setmaxnreg moves registers between warpgroups."""
CONSUMER_REGISTERS = 24
"""For addresses, descriptors and loop counters, in addition to the accumulator."""
MBARRIER_BYTES = 8
SWIZZLE_BYTES = 128
"""Bytes of a row in swizzled shared memory, so that wgmma's operands have no bank conflicts."""
LEAST_EXPERTS = 32
"""Least experts that are looked up together: one per thread of a warp."""
KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
CANDIDATES = ((128, 256, 128), (128, 128, 128), (128, 64, 64))
"""block_m, block_n and store_n."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles that two consumers can hold in registers, with rings of several depths."""
    depth = SWIZZLE_BYTES // scheme.activation.itemsize
    tiles = itertools.product((128, 256), (32, 64, 128, 256), (depth // 2, depth), (3, 4, 6, 8), (1, 2), (4, 8, 16))
    return tuple(
        Config(block_m, block_n, block_k, stages, block_n // parts, group_m)
        for block_m, block_n, block_k, stages, parts, group_m in tiles
        if block_n // parts >= 32
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """One fp32 accumulator per consumer; the ring, the staged result, and the mbarriers."""
    tiles = panels(int(case["T"]), int(case["E"]), config.block_m) * cdiv(int(case["N"]), config.block_n)
    outputs = config.block_m * config.block_n
    slot = (config.block_m + config.block_n) * config.block_k
    elements = config.stages * slot + config.block_m * config.store_n
    flops = 2.0 * outputs * cdiv(int(case["K"]), config.block_k) * config.block_k
    ctas = min(tiles, HOPPER_SMS)
    return Footprint(
        threads=THREADS,
        registers=outputs // 256 + CONSUMER_REGISTERS,
        shared_bytes=elements * scheme.activation.itemsize + 3 * config.stages * MBARRIER_BYTES,
        ctas=ctas,
        tensor_flops=flops * tiles / max(1, ctas),
    )


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The one of `CANDIDATES` with the least work for the busiest SM, with as many slots as fit."""

    def deepest(block_m: int, block_n: int, store_n: int) -> Config:
        beside = block_m * store_n * scheme.activation.itemsize
        stages = stages_that_fit((block_m + block_n) * SWIZZLE_BYTES, beside)
        return Config(block_m, block_n, SWIZZLE_BYTES // scheme.activation.itemsize, stages, store_n)

    return least_work([deepest(*candidate) for candidate in CANDIDATES], case)


def why_not_taken(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why wgmma or TMA cannot take the operands, or None."""
    if a.dtype == torch.float32:
        return "a: expected 16 bits for wgmma, got torch.float32; gemm_grouped/tma takes it"
    reason = why_no_maps(a, b)
    if reason or a.ndim != 2 or b.ndim != 3 or not a.numel() or not b.numel():
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


def _map(base: torch.Tensor, shape: list[int], stride: int, box: list[int]) -> TensorDescriptor:
    layout = layout_of(tuple(box), KINDS[base.dtype])
    return unchecked_map(TensorDescriptor, base, shape, [stride, 1], box, layout)


@register(
    op="gemm_grouped", name="cooperative", role="optimized", backend="gluon", min_sm=90,
    unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b), traffic=traffic_of("cooperative"),
    tuning=Tuning(Config, configs, heuristic, footprint),
)  # fmt: skip
def gemm_grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """Each expert's rows times its matrix on Hopper's tensor cores, summed in fp32 and rounded once.

    a: (T, K), rows sorted by expert; b: (E, K, N), a transposed view of contiguous (E, N, K) weights; fp16 or bf16;
    offsets: (E + 1,) int32 from 0 to T, never read by the host; returns (T, N).  K is contiguous in a and b; addresses
    and row strides, also of out, are whole 16 bytes.  Raises `ValueError` on other operands.
    """
    T, E, N, K = check_operands(a, b, offsets)
    out = output(out, (T, N), a)
    if not out.numel() or not K:
        return out.zero_()
    reason = why_not_taken(a, b)
    out_stored = stored_as(out, False)
    if reason is None and out_stored is None:
        reason = (
            f"out: expected an address and row stride of whole {ALIGNMENT} bytes for TMA, got a stride of "
            f"{out.stride(0) * out.element_size()} bytes; gemm_grouped/tma takes any"
        )
    if reason or out_stored is None:
        raise ValueError(reason)
    config = config or config_of("cooperative", a, b)
    a_stored, experts = stored(a, b)
    half = config.block_m // 2
    tiles = panels(T, E, config.block_m) * cdiv(N, config.block_n)
    _gemm[(min(tiles, sm_count(a.device)),)](
        _map(a, [T, K], a_stored.stride, [half, config.block_k]),
        _map(b, [E * N, K], experts.strides[1], [config.block_n, config.block_k]), offsets,
        _map(out, [T, N], out_stored.stride, [half, config.store_n]), out, out.stride(0), E, N, K,
        BLOCK_E=max(LEAST_EXPERTS, next_power_of_2(E)), num_warps=4, **config.launch_arguments,
    )  # fmt: skip
    return out

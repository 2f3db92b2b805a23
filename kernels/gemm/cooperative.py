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

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.gemm._coop_device import _gemm
from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm._tiled import traffic
from rooflab.kernels.gemm._tiles import GROUP_ROWS, ROW_BYTES, quickest
from rooflab.kernels.gemm._tma import stored_as, stored_operands, stored_output, why_not_moved
from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import BF16, SHARED_BYTES_PER_CTA, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and the ring."""

    block_m: int
    """Each consumer takes half, or with `turns` all."""
    block_n: int
    block_k: int
    stages: int
    """Slots of the ring."""
    group_m: int
    """Row panels of tiles that share their columns of B in L2."""
    store_n: int
    """Columns of a finished tile that are staged at once: all, or half if the ring needs the memory."""
    lead: int = 0
    """Steps of K that the first consumer is ahead of the second, so that one stores while the other multiplies; each
    step costs a slot of the ring, which both hold."""
    turns: bool = False
    """Whether each consumer has whole tiles, and they multiply in turn."""


THREADS = 384
"""Two consumers and the warpgroup of the producer warp, because setmaxnreg moves registers between warpgroups."""
CONSUMER_REGISTERS = 24
"""For addresses, descriptors and loop counters, in addition to the accumulator."""
BARRIERS_A_STAGE = 3
"""One `full`, and one `empty` per consumer."""
OVERHEAD_BYTES = 1024
"""Shared memory for barriers and Gluon's partitions: under 0.5 KB in the compiled kernels."""
MOST_STAGES = 8
DEEP_K = 2048
"""From this K on a fourth slot is predicted to gain more than staging a whole tile; unmeasured."""
CANDIDATES = ((128, 256), (256, 128), (128, 128), (128, 64))
"""block_m and block_n; two consumers can hold at most 128 x 256 outputs."""
RINGS = (
    *((3, 0, False), (4, 0, False), (4, 1, False), (6, 0, False), (6, 2, False), (8, 0, False), (8, 4, False)),
    *((4, 0, True), (6, 0, True)),
)
"""Stages, lead and turns."""
KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles that two consumers can hold in registers, with rings of several depths."""
    depth = ROW_BYTES // scheme.activation.itemsize
    tiles = itertools.product((128, 256), (64, 128, 256), (depth // 2, depth), (8, 16), (1, 2))
    return tuple(
        Config(block_m, block_n, block_k, stages, group_m, block_n // parts, lead, turns)
        for block_m, block_n, block_k, group_m, parts in tiles
        for stages, lead, turns in RINGS
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """One fp32 accumulator per consumer; the ring with its barriers, and the staged part of a tile."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    outputs = config.block_m * config.block_n
    loaded = config.stages * (config.block_m + config.block_n) * config.block_k
    ctas = min(tiles, HOPPER_SMS)
    return Footprint(
        threads=THREADS,
        registers=outputs // (128 if config.turns else 256) + CONSUMER_REGISTERS,
        shared_bytes=(loaded + config.block_m * config.store_n * (1 + config.turns)) * scheme.activation.itemsize
        + config.stages * BARRIERS_A_STAGE * BARRIER_BYTES,
        ctas=ctas,
        tensor_flops=2.0 * outputs * cdiv(K, config.block_k) * config.block_k * tiles / max(1, ctas),
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, and the ring has at least two slots more than the lead; with turns nobody leads."""
    leads = config.lead == 0 or (config.lead + 2 <= config.stages and not config.turns)
    return leads and footprint(config, case, scheme).fits


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The quickest of `CANDIDATES`, each with as many slots as fit."""
    return quickest([_with_ring(m, n, case, scheme) for m, n in CANDIDATES], case, scheme)


def _with_ring(block_m: int, block_n: int, case: Case, scheme: Scheme) -> Config:
    """Stages half a tile if this makes room for a slot; not with a residual, which would make the consumer wait."""
    size = scheme.activation.itemsize
    large = block_m * block_n == 128 * 256
    halved = large and (size > 2 or (int(case["K"]) >= DEEP_K and not case.get("residual")))
    store_n = block_n // 2 if halved else block_n
    room = SHARED_BYTES_PER_CTA - OVERHEAD_BYTES - block_m * store_n * size
    stages = min(room // ((block_m + block_n) * ROW_BYTES), MOST_STAGES)
    return Config(block_m, block_n, ROW_BYTES // size, stages, GROUP_ROWS // block_m, store_n)


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
    bind=by_maps, traffic=traffic, tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def cooperative(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *,
    residual: Tensor | None, precision: str, config: Config, bound: Any,
) -> None:  # fmt: skip
    """a b + bias + residual on Hopper's tensor cores, accumulated in fp32 and rounded once."""
    a_map, b_map, c_map, residual_map, grid, sizes, constants = bound
    added = None if residual is None else residual_map(residual)
    _gemm[grid](a_map(a), b_map(b), bias, added, c_map(c), *sizes, **constants)

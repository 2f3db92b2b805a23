"""Implements the kernel `persistent`, the version after `tma`: launches only CTAs that run at the same time. Each CTA
computes several tiles of queries.

In `tma` the longest tiles of a causal mask may come last, when most SMs have no work left. Here the longest tiles come
first (Graham, 1969).

In `tma`, the keys of many heads compete for L2. Here the heads are divided into sections whose keys and values fit in
L2. The sections come one after another.

The loads of a tile start after the store of the previous tile, unlike in gemm/persistent.py. Triton cannot fuse the
loop over tiles, because it contains several inner loops.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import nothing_seen, options, traffic
from rooflab.kernels._attention_configs import Config
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.flash_attention._by_tma import configs, footprint, query_tiles, tensor_map
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish, key_tiles, row_offsets, weigh
from rooflab.kernels.lib.attention_gluon import nth_tile, place, section_heads
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.kernels.tuning import BF16, Defaults, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme


@dataclass(frozen=True)
class PersistentConfig(Config):
    """A config of the kernel `tma` plus the number of CTAs per SM."""

    ctas_per_sm: int

    @property
    def launch_arguments(self) -> dict[str, Any]:
        """Returns the config as arguments of a launch.  Leaves out the number of CTAs, which only the grid needs."""
        return {arg_name: value for arg_name, value in super().launch_arguments.items() if arg_name != "CTAS_PER_SM"}


DEFAULTS = Defaults(
    (
        ({"D": 64}, PersistentConfig(128, 64, 8, 3, 2)),
        ({"D": 128}, PersistentConfig(128, 128, 8, 2, 1)),
        ({}, PersistentConfig(128, 64, 8, 2, 1)),
    )
)


def persistent_configs(case: Case, scheme: Scheme = BF16) -> tuple[PersistentConfig, ...]:
    """Returns the configs to try: the configs of the kernel `tma`, each with one and with two CTAs per SM."""
    return tuple(PersistentConfig(**asdict(config), ctas_per_sm=ctas) for config in configs(case) for ctas in (1, 2))


def ctas(config: Any, case: Case) -> int:
    """Returns the number of CTAs: one per tile, but at most `ctas_per_sm` per SM."""
    return min(query_tiles(config, case), HOPPER_SMS * int(config.ctas_per_sm))


@triton.jit(do_not_specialize=["T", "S", "heads", "section", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, out_ptr, lse_ptr, T, S, H, group, heads, section, window, scale, factor,
    cap, out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(T, BLOCK_M)
    tiles = tiles_m * heads
    for round_id in range(0, tl.cdiv(tiles, tl.num_programs(0))):
        tile_id = nth_tile(round_id, tl.program_id(0), tl.num_programs(0))
        if tile_id < tiles:
            tile_m, head = place(tile_id, tiles_m, heads, section, CAUSAL)
            b = head // H
            h = head % H
            first_row = tile_m * BLOCK_M
            rows = first_row + tl.arange(0, BLOCK_M)
            q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
            h_kv = h // group
            last_row = tl.minimum(first_row + BLOCK_M, T) - 1
            m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            l_i = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            range_ends = key_tiles(first_row, last_row, T, S, window, CAUSAL, WINDOW, BLOCK_N)
            for span in tl.static_range(0 if WINDOW else 1, 3):  # the middle one of three ranges of keys needs no mask
                for k_start in range(range_ends[span], range_ends[span + 1], BLOCK_N):
                    k = k_map.load([b, h_kv, k_start, 0]).reshape(BLOCK_N, BLOCK_D)
                    scores = tl.dot(q, k.T)
                    weights, rescale_factor, m_i, l_i = weigh(
                        scores, m_i, l_i, k_start, rows, S, T, window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED,
                        span != 1, BLOCK_N,
                    )  # fmt: skip
                    # Past the keys' end TMA gives zeros, so values need no mask.
                    v = v_map.load([b, h_kv, k_start, 0]).reshape(BLOCK_N, BLOCK_D)
                    acc *= rescale_factor[:, None]
                    acc = tl.dot(weights.to(v.dtype), v, acc)
            out_rows = row_offsets(b, h, rows, out_stride_b, out_stride_t, out_stride_h)
            lse_rows = row_offsets(b, h, rows, lse_stride_b, lse_stride_t, lse_stride_h)
            finish(acc, m_i, l_i, sinks_ptr, h * sinks_stride, out_ptr, out_rows, lse_ptr, lse_rows, rows < T, HEAD_DIM)


def bind(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options.  The grid has at most `ctas_per_sm` CTAs per SM."""
    (B, T, H, _), (_, S, H_kv, _), config = of.q.shape, of.k.shape, of.config
    heads, group_size = B * H, H // H_kv
    grid = (min(cdiv(T, config.block_m) * heads, sm_count(of.q.device) * config.ctas_per_sm),)
    tensor_maps = tensor_map(of.q, config.block_m), tensor_map(of.k, config.block_n), tensor_map(of.v, config.block_n)
    size_scalars = T, S, H, group_size, heads, min(heads, section_heads(of.k, group_size))
    scalar_args, strides, constexpr_args = options(of, S)
    return grid, tensor_maps, (*size_scalars, *scalar_args, *strides), constexpr_args


@kernel(
    backend="triton",
    min_sm=90,
    dtypes={"q": HALF_DTYPES},
    limits={"D": range(16, 257, 8)},
    mapped={"q": -1, "k": -1, "v": -1},
    traffic=traffic,
    tuning=Tuning(PersistentConfig, persistent_configs, DEFAULTS, footprint(ctas)),
    bind=bind,
    empty=nothing_seen,
    over="tma",
    shows={
        "": (
            "grid[0] == 132 < below.grid[0] and all(loop.spill_load + loop.spill_store == 0 for loop in products); "
            "len([loop for loop in loops if loop.wgmma and not loop.innermost]) == 1; "
            "not [loop for loop in below.loops if loop.wgmma and not loop.innermost]; "
            "products[0].wgmma == below.products[0].wgmma and products[0].FSEL == 0"
        )
    },
)
def persistent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
    config: PersistentConfig,
    bound: Any,
) -> None:
    """Computes attention with one or two CTAs per SM.  Each CTA computes several tiles, the longest first."""
    grid, (q_map, k_map, v_map), scalar_args, constexpr_args = bound
    _attention[grid](q_map(q), k_map(k), v_map(v), sinks, out, lse, *scalar_args, **constexpr_args)

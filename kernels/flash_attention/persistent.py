"""Over tma: as many CTAs as fit on the SMs are persistent and take one tile of queries after another.

In tma's grid the longest tiles of a causal mask (each head's last rows) may come at the end, when most SMs have no work
left, and L2 holds the keys of as many heads as there are SMs for their tiles.  Here the longest tiles come first
(Graham, 1969).  Every second round runs over the CTAs backwards, so the CTA with the longest tile of one round has the
shortest of the next.  All heads of a section, whose keys and values fit in L2 together, come before the next section.

The loads of a tile start after the store of the tile before: Triton fuses no loop that contains several loops, so loads
do not run on across tiles as in gemm/persistent.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels._attention_device import finish, softmax_numbers
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention import _tiles
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.flash_attention._maps import nothing_seen, tensor_map, why_not_loaded
from rooflab.kernels.flash_attention._tiles import padded, section_heads, tma_configs, tma_footprint, traffic
from rooflab.kernels.flash_attention._timeline import TIMELINE, keep
from rooflab.kernels.flash_attention._tma_device import attend
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.attention import check_options
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """One way to launch the kernel: query and key tile, warps, pipeline stages, CTAs per SM."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    host_only = ("ctas_per_sm",)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """The configs of tma, with one or two CTAs per SM."""
    return tuple(Config(**asdict(config), ctas_per_sm=ctas) for config in tma_configs(case) for ctas in (1, 2))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """As many CTAs as the SMs take, or as there are tiles."""
    tiles = cdiv(int(case["T"]), config.block_m) * int(case["B"]) * int(case["H"])
    held = _tiles.Config(config.block_m, config.block_n, config.num_warps, config.num_stages)
    needs = tma_footprint(held, case, ctas=0)
    return replace(needs, ctas=min(tiles, HOPPER_SMS * config.ctas_per_sm))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By head_dim, as in tma, with the CTAs that fit on an SM."""
    chosen = _tiles.tma_choice(int(case["D"]))
    ctas = 2 if padded(int(case["D"])) <= 64 else 1
    return Config(**asdict(chosen), ctas_per_sm=ctas)


@triton.jit
def nth_tile(turn, cta, ctas):
    """The tile of a CTA's round `turn`; every second round runs over the CTAs backwards."""
    return turn * ctas + (cta if turn % 2 == 0 else ctas - 1 - cta)


@triton.jit
def place(tile, tiles_m, heads, section, CAUSAL: tl.constexpr):
    """Row of a tile (in tiles) and its head.  In the last section long tiles come first, in the one before it short
    ones, and so on, so lengths change slowly."""
    index = tile // (section * tiles_m)
    first = index * section
    size = min(heads - first, section)
    inside = tile - first * tiles_m
    tile_m = inside // size
    if CAUSAL:
        falls = ((heads - 1) // section - index) % 2 == 0
        tile_m = tiles_m - 1 - tile_m if falls else tile_m
    return tile_m, first + inside % size


@triton.jit(do_not_specialize=["T", "S", "heads", "section", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, out_ptr, lse_ptr, timeline_ptr, T, S, H, group, heads, section, window, scale,
    factor, cap, out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(T, BLOCK_M)
    tiles = tiles_m * heads
    for turn in range(0, tl.cdiv(tiles, tl.num_programs(0))):
        tile = nth_tile(turn, tl.program_id(0), tl.num_programs(0))
        if tile < tiles:
            if timeline_ptr is not None:
                began = globaltimer()
            tile_m, head = place(tile, tiles_m, heads, section, CAUSAL)
            b = head // H
            h = head % H
            first_row = tile_m * BLOCK_M
            rows = first_row + tl.arange(0, BLOCK_M)
            q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
            acc, peak, total = attend(
                q, k_map, v_map, b, h // group, rows, first_row, tl.minimum(first_row + BLOCK_M, T) - 1, S, T, window,
                scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED, BLOCK_D, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            # int64, because offsets of batch, row and head pass 2**31 elements; the maps use 64 bits anyway.
            b64 = b.to(tl.int64)
            h64 = h.to(tl.int64)
            rows64 = rows.to(tl.int64)
            result, lse = finish(acc, peak, total, sinks_ptr, h64 * sinks_stride, SINKS)
            dims = tl.arange(0, BLOCK_D)
            mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
            out_offsets = b64 * out_stride_b + h64 * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
            tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
            if LSE:
                lse_offsets = b64 * lse_stride_b + h64 * lse_stride_h + rows64 * lse_stride_t
                tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)
            if timeline_ptr is not None:
                keep(timeline_ptr, head * tiles_m + tile_m, began)


@register(
    op="flash_attention", name="persistent", role="optimized", backend="triton", min_sm=90,
    unsupported=lambda inputs: why_not_loaded(inputs.q, inputs.k, inputs.v), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint),
)  # fmt: skip
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    out: Returned | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> Returned:
    """Attention by persistent CTAs.  q: (B, T, H, D); k, v: (B, S, H_kv, D), fp16 or bf16.

    Returns (B, T, H, D), and with `return_lse` the log-sum-exp (B, T, H) fp32.  Addresses and strides of q, k and v are
    whole 16 bytes, D is a multiple of 8.  Raises `ValueError` on wrong shapes, dtypes, options or strides.
    """
    check_args(q, k, v)
    check_options(q, causal, window, softcap, sinks)
    reason = why_not_loaded(q, k, v)
    if reason:
        raise ValueError(reason)
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    B, T, H, D = q.shape
    S, group = k.shape[1], H // k.shape[2]
    if not out.numel() or S == 0:
        return nothing_seen(out, lse, sinks)
    config = config or default_config("flash_attention", "persistent", q.dtype, q.device, B=B, T=T, H=H, D=D)
    windowed = window is not None and window < S  # a wider window hides nothing
    scale, factor, cap, negated = softmax_numbers(q, softmax_scale, softcap)
    tiles = cdiv(T, config.block_m) * B * H
    _attention[(min(tiles, sm_count(q.device) * config.ctas_per_sm),)](
        tensor_map(q, config.block_m), tensor_map(k, config.block_n), tensor_map(v, config.block_n), sinks, out, lse,
        TIMELINE.get(), T, S, H, group, B * H, min(B * H, section_heads(k, group)), window if windowed else 0, scale,
        factor, cap, *out.stride()[:3], *((0, 0, 0) if lse is None else lse.stride()),
        0 if sinks is None else sinks.stride(0),
        CAUSAL=causal, WINDOW=windowed, CAP=softcap is not None, NEGATED=negated, SINKS=sinks is not None,
        LSE=return_lse, HEAD_DIM=D, BLOCK_D=padded(D), **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)

"""Over chunked, in Gluon: TMA copies pages, and a separate warp issues the copies.

In chunked the warps that multiply compute an address for each 16 bytes.  Here one thread issues one copy of a page's
keys of a head, at least 8 tokens at a time.  Two warpgroups of 64 rows overlap one block's value product with the next
block's exponentials, as in flash_attention's ping_pong but without turns (Shah et al., "FlashAttention-3", arXiv
2407.08608).  Rows are queries with their group's heads, as in chunked; CTAs are persistent.  A page may hold NaN past
the end of its sequence, so the producer writes zeros there before consumers get the last block's values.

Tried, predicted, not built: docs/notes/paged_attention.md.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels._attention_device import softmax_numbers
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._layouts import PAGES
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels._tma import unchecked_map
from rooflab.kernels.configs import default_config
from rooflab.kernels.paged_attention import chunked
from rooflab.kernels.paged_attention._args import check_args, check_paged_options
from rooflab.kernels.paged_attention._pages_consume import pages_kernel
from rooflab.kernels.paged_attention._split_work import MOST_HEAD_DIM, unaligned
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.model import Traffic

THREADS = 384
"""Two consumers and the warpgroup of the producer warp, because setmaxnreg moves registers between warpgroups."""
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
"""Registers per thread after setmaxnreg."""
ADDRESS_REGISTERS = 24
"""For peak, sum, positions and loop counters, in addition to accumulator, scores and weights."""
TILE_M = 128
"""Rows per CTA; each consumer takes half."""
LEAST_PAGE = 8
"""Rows after which the swizzle repeats; a box begins at a multiple of them."""
ELEMENT_BYTES = 2
"""Bytes of a value; the kernel takes only 16-bit dtypes."""
BARRIER_BYTES = 8
MOST_UNITS = 2**31
"""Coordinates of a tensor map have 32 bits with a sign."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Keys per block, and slots of each ring."""

    block_n: int
    stages: int


def padded(head_dim: int) -> int:
    """Columns of a tile: TMA fills those past head_dim with zeros."""
    return max(64, int(next_power_of_2(head_dim)))


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Blocks whose scores a consumer can hold, with rings of several depths."""
    return tuple(itertools.starmap(Config, itertools.product((64, 128, 256), (2, 3, 4, 5))))


def _consumer_registers(config: Config, head_dim: int) -> int:
    """fp32 accumulator and scores and 16-bit weights, for 64 rows on 128 threads."""
    return padded(head_dim) // 2 + config.block_n // 2 + config.block_n // 4 + ADDRESS_REGISTERS


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Average registers of the CTA's threads; queries, both rings and barriers in shared memory."""
    B, H, H_kv, D = (int(case[key]) for key in ("B", "H", "H_kv", "D"))
    tiles = chunked.tiles_at_most(B * int(case.get("queries", 1)), B, H // H_kv, TILE_M)
    rows = TILE_M + 2 * config.stages * config.block_n
    return Footprint(
        threads=THREADS,
        registers=(2 * _consumer_registers(config, D) + PRODUCER_REGISTERS) // 3,
        shared_bytes=rows * padded(D) * ELEMENT_BYTES + (1 + 4 * config.stages) * BARRIER_BYTES,
        ctas=min(tiles * H_kv, HOPPER_SMS),
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, and each of its consumers."""
    held = _consumer_registers(config, int(case["D"])) <= CONSUMER_REGISTERS
    return footprint(config, case, scheme).fits and held


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The widest block that consumers and two slots can hold; more slots if they are small."""
    width = padded(int(case["D"]))
    return Config(128 if width <= 128 else 64, 4 if width == 64 else 2)


def why_not_taken(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> str | None:
    """Why TMA cannot load the cache or wgmma cannot multiply, or None."""
    D, block_size = q.shape[-1], k_cache.shape[1]
    if q.dtype == torch.float32:
        return "wgmma rounds fp32 to TF32; paged_attention/chunked takes it"
    if D % 8 or not 0 < D <= MOST_HEAD_DIM:
        return f"needs a head_dim of whole 16 bytes up to {MOST_HEAD_DIM}, got {D}; paged_attention/chunked takes any"
    if block_size < LEAST_PAGE or block_size & (block_size - 1):
        return (
            f"needs a block_size that is a power of two from {LEAST_PAGE} on, got {block_size}; "
            "paged_attention/chunked takes any"
        )
    if unaligned(k_cache) or unaligned(v_cache):
        return "TMA needs keys and values at multiples of 16 bytes; paged_attention/chunked takes any"
    if max(_units(cache)[1] for cache in (k_cache, v_cache)) > MOST_UNITS:
        return "needs strides of pages and heads with a larger common factor; paged_attention/chunked takes any"
    return None


def traffic(inputs: Arguments) -> Traffic:
    """The traffic of chunked; the kernel also reads the rest of the pages in a block: few bytes, not counted."""
    return chunked.traffic(inputs)


def _units(cache: torch.Tensor) -> tuple[int, int, int, int]:
    """Pages and heads as one dimension of the tensor map: its stride, its size, and how far apart in it two pages and
    two heads are."""
    num_blocks, _, H_kv, _ = cache.shape
    page, head = (cache.stride(dim) if cache.shape[dim] > 1 else 0 for dim in (0, 2))
    unit = math.gcd(page, head) or 8
    page, head = page // unit, head // unit
    return unit, (num_blocks - 1) * page + (H_kv - 1) * head + 1, page, head


def _map(cache: torch.Tensor, box: int, whole: bool) -> tuple[TensorDescriptor, int, int]:
    """The tensor map of a cache, and how far apart in its first dimension two pages and two heads are.

    A box has `box` keys of a page and a head in wgmma's order: 8 rows of 64 columns, the same rows' next columns
    (if `whole`; otherwise the next columns are another box), the next 8 rows.  With pages and heads that is one
    dimension more than the five of a tensor map, so pages and heads are one.
    """
    block_size, D = cache.shape[1], cache.shape[3]
    unit, units, page, head = _units(cache)
    row = cache.stride(1)
    shape = [units, block_size // 8, D // 64 if whole else 1, 8, 64 if whole else D]
    boxes = [1, box // 8, padded(D) // 64 if whole else 1, 8, 64]
    return unchecked_map(TensorDescriptor, cache, shape, [unit, 8 * row, 64, row, 1], boxes, PAGES), page, head


@register(
    op="paged_attention", name="tma_pages", role="optimized", backend="gluon", min_sm=90,
    unsupported=lambda inputs: why_not_taken(inputs.q, inputs.k_cache, inputs.v_cache), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    out: Returned | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> Returned:
    """Attention of chunks of queries through a block table, pages by TMA.  q: (T, H, D), fp16 or bf16; (T, H, D).

    block_size: a power of two, at least 8; keys and values at multiples of 16 bytes.  Does not wait for the device.
    Raises `ValueError` on wrong shapes, dtypes, strides or options.
    """
    check_args(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, window=window)
    check_paged_options(q, window, softcap, sinks)
    reason = why_not_taken(q, k_cache, v_cache)
    if reason:
        raise ValueError(f"q, k_cache, v_cache: {reason}")
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    (T, H, D), B = q.shape, len(seq_lens)
    block_size, H_kv = k_cache.shape[1:3]
    if not out.numel():
        return out if lse is None else (out, lse)
    if config is None:
        dims = {"B": B, "H": H, "H_kv": H_kv, "D": D, "queries": cdiv(T, B)}
        config = default_config("paged_attention", "tma_pages", q.dtype, q.device, **dims)
    tiles = chunked.tiles_at_most(T, B, H // H_kv, TILE_M)
    scale, factor, cap, negated = softmax_numbers(q, softmax_scale, softcap)
    box = min(block_size, config.block_n)
    whole = D % 64 == 0
    (keys, *k_units), (values, *v_units) = _map(k_cache, box, whole), _map(v_cache, box, whole)
    pages_kernel[(min(tiles * H_kv, sm_count(q.device)),)](
        q, keys, values, out, lse, sinks, block_table, seq_lens, cu_seqlens_q, B, H_kv, tiles, *k_units, *v_units,
        config.block_n // box, scale, factor, chunked.seen_at_most(window, block_table, k_cache), cap,
        *q.stride()[:2], block_table.stride(0), *out.stride()[:2], *(lse.stride() if lse is not None else (0, 0)),
        HEAD_DIM=D, D=padded(D), GROUP=H // H_kv, BLOCK_SIZE=block_size, BOX=box, WINDOW=window is not None,
        SOFTCAP=softcap is not None, NEGATED=negated, COPIES=1 if whole else padded(D) // 64, num_warps=4,
        **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)

"""Over chunked, in Gluon: TMA copies pages, and a separate warp issues the copies.

In chunked the warps that multiply compute an address for each 16 bytes.  Here one thread issues one copy of a page's
keys of a head, at least 8 tokens at a time.  Two warpgroups of 64 rows overlap one block's value product with the next
block's exponentials, as in flash_attention's ping_pong but without turns (Shah et al., "FlashAttention-3", arXiv
2407.08608).  Rows are queries with their group's heads, as in chunked; CTAs are persistent.  A page may hold NaN past
the end of its sequence, so the producer writes zeros there before consumers get the last block's values.

Tried, predicted, not built: docs/notes/paged_attention.md.
"""

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._attention import AttentionLaunch, softmax_numbers, strides_of
from rooflab.kernels._device import sm_count
from rooflab.kernels._layouts import PAGES
from rooflab.kernels._tma import MapMaker, map_maker
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import traffic, unaligned
from rooflab.kernels.paged_attention._configs import TILE_M, TMA_PAGES, PagesConfig, tile_columns, tiles_at_most
from rooflab.kernels.paged_attention._pages_consume import pages_kernel
from rooflab.kernels.paged_attention.chunked import MOST_HEAD_DIM, seen_at_most
from rooflab.kernels.takes import HALVES
from rooflab.reference.spec import Arguments

LEAST_PAGE = 8
"""Rows after which the swizzle repeats; a box begins at a multiple of them."""
MOST_UNITS = 2**31
"""Coordinates of a tensor map have 32 bits with a sign."""


def why_not_taken(inputs: Arguments) -> str | None:
    """Why TMA cannot load the cache or wgmma cannot multiply, or None."""
    k_cache, v_cache = inputs.k_cache, inputs.v_cache
    block_size, other = k_cache.shape[1], "; paged_attention/chunked takes any"
    if block_size < LEAST_PAGE or block_size & (block_size - 1):
        wanted = f"pages of a power of two of at least {LEAST_PAGE} tokens"
        return f"k_cache: expected {wanted}, got {block_size}{other}"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if unaligned(cache):
            return f"{name}: expected keys and values at multiples of 16 bytes, got strides {cache.stride()}{other}"
        if _units(cache)[1] > MOST_UNITS:
            wanted = "strides of pages and heads with a larger common factor"
            return f"{name}: expected {wanted}, got {cache.stride()}{other}"
    return None


def _units(cache: Tensor) -> tuple[int, int, int, int]:
    """Pages and heads as one dimension of the tensor map: its stride, its size, and how far apart in it two pages and
    two heads are."""
    num_blocks, _, H_kv, _ = cache.shape
    page, head = (cache.stride(dim) if cache.shape[dim] > 1 else 0 for dim in (0, 2))
    unit = math.gcd(page, head) or 8
    page, head = page // unit, head // unit
    return unit, (num_blocks - 1) * page + (H_kv - 1) * head + 1, page, head


def _map(cache: Tensor, box: int, whole: bool) -> tuple[MapMaker, int, int]:
    """What makes the tensor map of a cache, and how far apart in its first dimension two pages and two heads are.

    A box has `box` keys of a page and a head in wgmma's order: 8 rows of 64 columns, the same rows' next columns
    (if `whole`; otherwise the next columns are another box), the next 8 rows.  With pages and heads that is one
    dimension more than the five of a tensor map, so pages and heads are one.
    """
    block_size, D = cache.shape[1], cache.shape[3]
    unit, units, page, head = _units(cache)
    row = cache.stride(1)
    shape = [units, block_size // 8, D // 64 if whole else 1, 8, 64 if whole else D]
    boxes = [1, box // 8, tile_columns(D) // 64 if whole else 1, 8, 64]
    return map_maker(TensorDescriptor, shape, [unit, 8 * row, 64, row, 1], boxes, PAGES), page, head


def launch(of: Arguments) -> AttentionLaunch:
    """As many CTAs as SMs, or as there may be tiles."""
    (T, H, D), B, (_, block_size, H_kv, _) = of.q.shape, len(of.seq_lens), of.k_cache.shape
    tiles = tiles_at_most(T, B, H // H_kv, TILE_M)
    scale, factor, cap, negated = softmax_numbers(of.q, of.softmax_scale, of.softcap)
    box, whole = min(block_size, of.config.block_n), D % 64 == 0
    (keys, *k_units), (values, *v_units) = _map(of.k_cache, box, whole), _map(of.v_cache, box, whole)
    return AttentionLaunch(
        min(tiles * H_kv, sm_count(of.q.device)),
        (B, H_kv, tiles, *k_units, *v_units, of.config.block_n // box),
        (scale, factor, seen_at_most(of.window, of.block_table, of.k_cache), cap),
        (*of.q.stride()[:2], of.block_table.stride(0), *of.out.stride()[:2], *strides_of(of.lse, 2)),
        {
            "HEAD_DIM": D, "D": tile_columns(D), "GROUP": H // H_kv, "BLOCK_SIZE": block_size, "BOX": box,
            "WINDOW": of.window is not None, "SOFTCAP": of.softcap is not None, "NEGATED": negated,
            "COPIES": 1 if whole else tile_columns(D) // 64, "num_warps": 4, **of.config.launch_arguments,
        },
        (keys, values),
    )  # fmt: skip


@kernel(
    backend="gluon", min_sm=90, dtypes={"q": HALVES}, limits={"D": range(8, MOST_HEAD_DIM + 1, 8)},
    instead="paged_attention/chunked", unsupported=why_not_taken, aligned=("k_cache", "v_cache"), traffic=traffic,
    bind=launch, tuning=TMA_PAGES,
)  # fmt: skip
def tma_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, *,
    softmax_scale: float | None, cu_seqlens_q: Tensor | None, window: int | None, softcap: float | None,
    sinks: Tensor | None, return_lse: bool, config: PagesConfig, bound: AttentionLaunch,
) -> None:  # fmt: skip
    """A producer warp copies pages; two warpgroups of 64 rows multiply.  Does not wait for the device."""
    k_map, v_map = bound.maps
    pages_kernel[(bound.ctas,)](
        q, k_map(k_cache), v_map(v_cache), out, lse, sinks, block_table, seq_lens, cu_seqlens_q, *bound.sizes,
        *bound.scores, *bound.strides, **bound.flags,
    )  # fmt: skip

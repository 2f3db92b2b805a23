"""Holds the host code of `tma_pages`: its configs, a check of the caches' strides, and tensor maps of the caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.lib import attention_gluon as attention
from rooflab.kernels.lib.tma import PAGES_LAYOUT, map_maker
from rooflab.kernels.paged_attention._configs import tiles_at_most
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme

MIN_PAGE_TOKENS = 8
"""The number of rows after which the swizzle repeats; a box begins at a multiple of this number."""
MAX_UNITS = 2**31
"""The limit of a tensor map's coordinates, which are signed 32-bit integers."""


@dataclass(frozen=True)
class PagesConfig(LaunchConfig):
    """Holds the number of keys per block, and the number of slots in each ring of shared memory."""

    block_n: int
    stages: int


def footprint(config: PagesConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of a CTA with two consumer warpgroups.  Shared memory holds the queries, a ring buffer of
    keys, and a ring buffer of values."""
    B, H, H_kv, D = (int(case[size_name]) for size_name in ("B", "H", "H_kv", "D"))
    ctas = min(tiles_at_most(B * int(case.get("queries", 1)), B, H // H_kv, 2 * 64) * H_kv, HOPPER_SMS)
    return attention.footprint(
        2, D, config.block_n, config.stages, rows=2 * 64, barriers=1 + 4 * config.stages, ctas=ctas
    )


TMA_PAGES_TUNING = Tuning(
    PagesConfig,
    space(PagesConfig, block_n=(64, 128, 256), stages=(2, 3, 4, 5)),
    # The widest block that consumers and two slots can hold; more slots if they are small.  A guess, unmeasured.
    Defaults((({"D": 64}, PagesConfig(128, 4)), ({"D": 128}, PagesConfig(128, 2)), ({}, PagesConfig(64, 2)))),
    footprint,
)


def why_too_far(inputs: Arguments) -> str | None:
    """Returns why pages and heads of a cache are too far apart for the 32-bit coordinates of a tensor map, or None."""
    for name, cache in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
        if _units(cache)[1] > MAX_UNITS:
            expected_text = "strides of pages and heads with a larger common factor"
            return f"{name}: expected {expected_text}, got {cache.stride()}"
    return None


def _units(cache: Tensor) -> tuple[int, int, int, int]:
    """Returns the number of elements in a unit, and three numbers in units: the cache size, the page stride and the
    head stride. A unit is the greatest common divisor of both strides."""
    num_blocks, _, H_kv, _ = cache.shape
    page_stride, head_stride = (cache.stride(dim) if cache.shape[dim] > 1 else 0 for dim in (0, 2))
    unit_elements = math.gcd(page_stride, head_stride) or 8
    page_stride, head_stride = page_stride // unit_elements, head_stride // unit_elements
    return unit_elements, (num_blocks - 1) * page_stride + (H_kv - 1) * head_stride + 1, page_stride, head_stride


def cache_map(cache: Tensor, box: int, whole: bool) -> tuple[Any, int, int]:
    """Returns a function that makes the TMA tensor map of a cache.  Also returns two strides: from page to page, and
    from head to head.

    A tensor map has at most five dimensions.  Four of them describe wgmma's atoms of 8 rows and 64 columns.  So pages
    and heads share the first dimension.  Both strides count steps along this dimension.

    One TMA copy loads `box` keys of one page and head.  If `whole`, it loads all columns, else 64 columns."""
    block_size, D = cache.shape[1], cache.shape[3]
    unit_elements, cache_units, page, head = _units(cache)
    row = cache.stride(1)
    shape = [cache_units, block_size // 8, D // 64 if whole else 1, 8, 64 if whole else D]
    box_shape = [1, box // 8, attention.tile_columns(D) // 64 if whole else 1, 8, 64]
    return map_maker(TensorDescriptor, shape, [unit_elements, 8 * row, 64, row, 1], box_shape, PAGES_LAYOUT), page, head

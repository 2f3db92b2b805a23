"""The inputs of `tma_pages`: the configs, the caches that the kernel refuses, and the tensor maps of caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.lib import attention_gluon as attention
from rooflab.kernels.lib.tma import PAGES, map_maker
from rooflab.kernels.paged_attention._configs import tiles_at_most
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme

LEAST_PAGE = 8
"""The number of rows after which the swizzle repeats; a box begins at a multiple of this number."""
MOST_UNITS = 2**31
"""The limit of a tensor map's coordinates, which are signed 32-bit integers."""


@dataclass(frozen=True)
class PagesConfig(LaunchConfig):
    """A config: the keys per block, and the slots of each ring."""

    block_n: int
    stages: int


def footprint(config: PagesConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the needs of a CTA with two consumers: queries and both rings."""
    B, H, H_kv, D = (int(case[key]) for key in ("B", "H", "H_kv", "D"))
    ctas = min(tiles_at_most(B * int(case.get("queries", 1)), B, H // H_kv, 2 * 64) * H_kv, HOPPER_SMS)
    return attention.footprint(
        2, D, config.block_n, config.stages, rows=2 * 64, barriers=1 + 4 * config.stages, ctas=ctas
    )


TMA_PAGES = Tuning(
    PagesConfig,
    space(PagesConfig, block_n=(64, 128, 256), stages=(2, 3, 4, 5)),
    # The widest block that consumers and two slots can hold; more slots if they are small.  A guess, unmeasured.
    Defaults((({"D": 64}, PagesConfig(128, 4)), ({"D": 128}, PagesConfig(128, 2)), ({}, PagesConfig(64, 2)))),
    footprint,
)


def why_too_far(inputs: Arguments) -> str | None:
    """Returns why a tensor map cannot count the pages and heads of a cache as one dimension, or None."""
    for name, cache in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
        if _units(cache)[1] > MOST_UNITS:
            expected = "strides of pages and heads with a larger common factor"
            return f"{name}: expected {expected}, got {cache.stride()}"
    return None


def _units(cache: Tensor) -> tuple[int, int, int, int]:
    """Describes pages and heads as one dimension of the tensor map: the stride and the size of the dimension, and the
    distance in it between two pages and between two heads."""
    num_blocks, _, H_kv, _ = cache.shape
    page, head = (cache.stride(dim) if cache.shape[dim] > 1 else 0 for dim in (0, 2))
    unit = math.gcd(page, head) or 8
    page, head = page // unit, head // unit
    return unit, (num_blocks - 1) * page + (H_kv - 1) * head + 1, page, head


def cache_map(cache: Tensor, box: int, whole: bool) -> tuple[Any, int, int]:
    """Returns the maker of a cache's tensor map, and the distances of pages and of heads in the first dimension.

    A box has `box` keys of a page and a head in wgmma's order: 8 rows of 64 columns, the same rows' next columns (if
    `whole`; otherwise the next columns are another box), the next 8 rows.  With pages and heads these are six
    dimensions; a tensor map has five, so pages and heads share one.
    """
    block_size, D = cache.shape[1], cache.shape[3]
    unit, units, page, head = _units(cache)
    row = cache.stride(1)
    shape = [units, block_size // 8, D // 64 if whole else 1, 8, 64 if whole else D]
    boxes = [1, box // 8, attention.tile_columns(D) // 64 if whole else 1, 8, 64]
    return map_maker(TensorDescriptor, shape, [unit, 8 * row, 64, row, 1], boxes, PAGES), page, head

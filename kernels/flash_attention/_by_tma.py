"""Provides helpers for flash_attention's Triton kernels with TMA: configs, resources of a CTA, and tensor maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels import _attention_configs as tiles
from rooflab.kernels._attention_configs import Config, padded
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import ALIGNMENT, MapMaker
from rooflab.kernels.lib.tma import map_maker
from rooflab.kernels.tuning import BF16, Footprint, space
from rooflab.reference.spec import Case, Scheme

ROW_ORDER, COLUMNS = (0, 2, 1, 3), (0, 2, 3, 1)
"""The order of the dimensions of (B, T, H, D) in a map: rows of a head, or columns of values along the keys."""
OPERAND_BYTES = 2
TILES = space(Config, block_m=(64, 128), block_n=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4))
ROWS_OF_DEFAULTS: tuple[tuple[Mapping[str, int], Config], ...] = (
    # Two CTAs of a narrow head fit on an SM together, and their products and exponentials overlap.
    ({"D": 64}, Config(128, 64, 8, 3)),
    ({"D": 128}, Config(128, 128, 8, 2)),
    ({}, Config(128, 64, 8, 2)),
)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Returns the configs to try.  If head_dim > 64, there are no tiles of 128 rows on four warps, because registers
    would spill (read in the SASS)."""
    has_narrow_head = padded(int(case["D"])) <= 64
    return tuple(config for config in TILES(case) if has_narrow_head or (config.block_m, config.num_warps) != (128, 4))


def query_tiles(config: Config, case: Case) -> int:
    """Returns the number of query tiles, over all heads and sequences."""
    return cdiv(int(case["T"]), config.block_m) * int(case["H"]) * int(case["B"])


def footprint(ctas: Callable[[Config, Case], int] = query_tiles) -> Callable[..., Footprint]:
    """Returns a function that computes a CTA's resources.  The argument `ctas` is a function that counts CTAs."""

    def needs(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        D = padded(int(case["D"]))
        return Footprint(
            threads=32 * config.num_warps,
            registers=tiles.registers(config, D, weights=True),
            shared_bytes=(config.block_m + 2 * config.num_stages * config.block_n) * D * OPERAND_BYTES,
            ctas=ctas(config, case),
        )

    return needs


def tensor_map(x: torch.Tensor, rows: int, order: Sequence[int] = ROW_ORDER) -> MapMaker:
    """Returns a function that makes a TMA map of `x` `[B, T, H, D]`: dimensions in `order`, boxes of `rows` rows."""
    box_shape = 1, rows, 1, padded(x.shape[3])
    strides = [x.stride(dim) if x.shape[dim] > 1 else ALIGNMENT for dim in order[:3]]
    return map_maker(
        TensorDescriptor, [x.shape[dim] for dim in order], [*strides, 1], [box_shape[dim] for dim in order]
    )

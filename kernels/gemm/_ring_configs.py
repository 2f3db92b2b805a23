"""The tiles of gemm's rungs with a producer in Gluon and CUDA C++: what a CTA needs, and at the end a row for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import ROW_BYTES, at_both_widths, ring_footprint
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme

DEEP_K = 2048
"""From this K on a fourth slot is predicted to gain more than staging a whole tile; unmeasured."""
RINGS = (
    *((3, 0, False), (4, 0, False), (4, 1, False), (6, 0, False), (6, 2, False), (8, 0, False), (8, 4, False)),
    *((4, 0, True), (6, 0, True)),
)
"""Stages, lead and turns."""


@dataclass(frozen=True)
class RingTile(LaunchConfig):
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


def _rings(case: Case, scheme: Scheme = BF16) -> tuple[RingTile, ...]:
    """Tiles that two consumers can hold in registers, with rings of several depths."""
    depth = ROW_BYTES // scheme.activation.itemsize
    tiles = itertools.product((128, 256), (64, 128, 256), (depth // 2, depth), (8, 16), (1, 2))
    return tuple(
        RingTile(block_m, block_n, block_k, stages, group_m, block_n // parts, lead, turns)
        for block_m, block_n, block_k, group_m, parts in tiles
        for stages, lead, turns in RINGS
    )


def _ring(config: RingTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """With the staged part of a tile, of both consumers with turns."""
    tiles = cdiv(int(case["M"]), config.block_m) * cdiv(int(case["N"]), config.block_n)
    blocks, stored = (config.block_m, config.block_n, config.block_k), config.block_m * config.store_n
    staged = stored * (1 + config.turns)
    return ring_footprint(blocks, config.stages, staged, tiles, int(case["K"]), scheme, turns=config.turns)


def _is_ring(config: RingTile, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, and the ring has at least two slots more than the lead; with `turns` the lead is 0."""
    leads = config.lead == 0 or (config.lead + 2 <= config.stages and not config.turns)
    return leads and _ring(config, case, scheme).fits


def _depth(case: Case, scheme: Scheme) -> dict[str, int]:
    """The outputs; and K where a fourth slot may gain more than staging a whole tile: not with a residual, which would
    make the consumer wait."""
    outputs = int(case["M"]) * int(case["N"])
    return {"outputs": outputs, "deep": 0 if case.get("residual") else int(case["K"])}


# Unmeasured.  Few rows of a take narrow tiles, so that more SMs have one; the most slots that fit, fewer in 32 bits.
_WHOLE = RingTile(128, 256, 64, 3, 16, 256)
_HALF = RingTile(128, 256, 64, 4, 16, 128), RingTile(128, 256, 64, 3, 16, 128)
COOPERATIVE = Tuning(
    RingTile, _rings,
    Defaults(at_both_widths(
        ({"M": 256, "N": 6144}, RingTile(128, 64, 64, 8, 16, 64)),
        ({"M": 256, "deep": DEEP_K - 1}, _WHOLE), *(({"M": 256}, half) for half in _HALF),
        ({"outputs": 524288}, RingTile(128, 64, 64, 8, 16, 64)),
        ({"outputs": 2097152}, RingTile(128, 128, 64, 6, 16, 128)),
        ({"outputs": 2097152}, RingTile(128, 128, 64, 5, 16, 128)),
        ({"deep": DEEP_K - 1}, _WHOLE), *(({}, half) for half in _HALF),
    ), _depth), _ring, _is_ring,
)  # fmt: skip

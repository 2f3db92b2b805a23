"""Defines configs of attention kernels (tiles of queries and keys), and the tuning of kernels that load by pointers.

The resources of a CTA do not state its FLOPs (`tensor_flops` is 0), because under a causal mask each CTA has a
different amount of work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Case, Scheme

ADDRESS_REGISTERS = 24
"""Registers per thread for pointers, masks and the running maximum and sum.  Accumulator and scores come on top."""
FMA_OUTPUTS = 38
"""The most fp32 values of accumulator and scores per thread in products by FMAs, whose operands are in registers too.
With more values at a head_dim of 128, nearly all tiles spill 0.5 to 13 KB per thread (read in the compiled kernels)."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """A config of an attention kernel: tile sizes for queries and keys, number of warps, and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


TILES = space(Config, block_m=(32, 64, 128), block_n=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3, 4))
FMA_TILES = space(Config, block_m=(16, 32, 64), block_n=(16, 32, 64), num_warps=(4, 8), num_stages=(1, 2))


def padded(head_dim: int) -> int:
    """Returns the columns of a tile: `head_dim` rounded up to a power of two.  The added columns are zeros."""
    return int(next_power_of_2(head_dim))


def staged_tiles(config: Config, scheme: Scheme) -> int:
    """Returns how many tiles of keys and values Triton's pipeline keeps in shared memory. The formula comes from
    reading compiled kernels. tests/contracts/test_configs.py checks it."""
    # wgmma (64 rows and more) reads a stage while others are filled; mma.sync frees a stage at once.
    uses_wgmma = config.block_m >= 64 and scheme.activation != torch.float32
    stage_count = config.num_stages if uses_wgmma else config.num_stages - 1
    return 2 * stage_count if config.num_stages > 1 else 1


def registers(config: Config, head_dim: int, weights: bool = False, others: int = ADDRESS_REGISTERS) -> int:
    """Returns the registers per thread: fp32 accumulator, scores, and `others` (such as addresses).  If `weights` is
    True, also counts the softmax weights in 16 bits."""
    column_count = head_dim + config.block_n + (config.block_n // 2 if weights else 0)
    return int(cdiv(config.block_m * column_count, 32 * config.num_warps)) + others


def pointers_footprint(
    config: Config, case: Case, scheme: Scheme, ctas: int, weights: bool, others: int = ADDRESS_REGISTERS
) -> Footprint:
    """Returns the resources of a CTA that loads by pointers.  Shared memory holds tiles of queries, keys and values."""
    D, item_bytes = padded(int(case["D"])), scheme.activation.itemsize
    bytes_per_dim = staged_tiles(config, scheme) * config.block_n * scheme.weight.itemsize
    return Footprint(
        threads=32 * config.num_warps,
        registers=registers(config, D, weights and item_bytes == 2, others),
        shared_bytes=(config.block_m * item_bytes + bytes_per_dim) * D,
        ctas=ctas,
    )


def by_pointers(weights: bool = True, others: int = ADDRESS_REGISTERS, widest: Config = Config(32, 16, 8, 1)) -> Tuning:
    """Returns the tuning (configs to try, default configs, a CTA's resources) of an attention kernel that loads by
    pointers.

    `weights` tells whether a thread also keeps the softmax weights in registers. `others` is the number of a thread's
    further registers, such as for addresses. `widest` is the default config for fp32 with a head_dim above 128."""
    default_configs = Defaults(
        (
            ({"itemsize": 2, "D": 64}, Config(128, 64, 4, 2)),
            ({"itemsize": 2, "D": 128}, Config(128, 64, 8, 2)),
            ({"itemsize": 2}, Config(64, 64, 8, 2)),
            # fp32 products are FMAs, whose operands fill the registers: a wider tile spills (read in the SASS).
            ({"D": 64}, Config(32, 32, 4, 1)),
            ({"D": 128}, Config(32, 32, 8, 1)),
            ({}, widest),
        )
    )

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
        if scheme.activation != torch.float32:
            return TILES(case)
        head_dim = padded(int(case["D"]))
        return tuple(c for c in FMA_TILES(case) if c.block_m * (head_dim + c.block_n) <= FMA_OUTPUTS * 32 * c.num_warps)

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        ctas = cdiv(int(case["T"]), config.block_m) * int(case["B"]) * int(case["H"])
        return pointers_footprint(config, case, scheme, ctas, weights, others)

    return Tuning(Config, configs, default_configs, footprint)

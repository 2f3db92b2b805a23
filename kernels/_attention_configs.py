"""One config for attention's tiles of queries and keys, and what a CTA with such tiles holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.tuning import LaunchConfig
from rooflab.reference.spec import Scheme

ADDRESS_REGISTERS = 24
"""For pointers, masks and the running maximum and sum, in addition to accumulator and scores."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """One way to launch the kernel: query and key tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded(head_dim: int) -> int:
    """Columns of a tile: those past head_dim are zeros and are multiplied too."""
    return int(next_power_of_2(head_dim))


def staged_tiles(config: Config, scheme: Scheme) -> int:
    """Tiles of keys and values that a pipeline by pointers holds, as Triton allocates them (read in the compiled
    kernels; tests/test_configs.py compares them)."""
    # wgmma (64 rows and more) reads a stage while others are filled; mma.sync frees a stage at once.
    warpgroup = config.block_m >= 64 and scheme.activation != torch.float32
    held = config.num_stages if warpgroup else config.num_stages - 1
    return 2 * held if config.num_stages > 1 else 1


def registers(config: Config, head_dim: int, weights: bool = False, others: int = ADDRESS_REGISTERS) -> int:
    """Per thread: the fp32 accumulator, a tile of scores, their `weights` rounded to 16 bits, and `others`."""
    columns = head_dim + config.block_n + (config.block_n // 2 if weights else 0)
    return int(cdiv(config.block_m * columns, 32 * config.num_warps)) + others

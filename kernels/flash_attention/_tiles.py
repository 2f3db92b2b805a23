"""What the tiled kernels of flash_attention share on the host: configs, the needs of a CTA, and traffic."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 24
"""For pointers, masks and the running peak and sum, in addition to accumulator and scores."""
TMA_OPERAND_BYTES = 2
"""Bytes of a value in the kernels from tma on."""
FMA_OUTPUTS = 38
"""fp32 values of accumulator and scores per thread; FMAs hold their operands in registers too: with more, at a head_dim
of 128, nearly all tiles spill 0.5 to 13 KB per thread (read in the compiled kernels)."""
SECTION_BYTES = 32 * 2**20
"""Keys and values that L2 is assumed to keep, of its 50 MB, for the order of tiles; unmeasured."""


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


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles that the warps divide evenly, with pipelines of several depths."""
    if scheme.activation == torch.float32:
        columns = padded(int(case["D"]))
        all_configs = itertools.starmap(Config, itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (1, 2)))
        return tuple(c for c in all_configs if c.block_m * (columns + c.block_n) <= FMA_OUTPUTS * 32 * c.num_warps)
    return tuple(itertools.starmap(Config, itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))))


def tma_configs(case: Case) -> tuple[Config, ...]:
    """Tiles for wgmma, with pipelines of several depths; 128 rows on four warps only for a head_dim up to 64, because
    wider ones spill (read in the compiled kernels)."""
    all_configs = itertools.starmap(Config, itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)))
    narrow = padded(int(case["D"])) <= 64
    return tuple(config for config in all_configs if narrow or (config.block_m, config.num_warps) != (128, 4))


def registers(config: Config, head_dim: int, itemsize: int) -> int:
    """Per thread: the fp32 accumulator, a tile of scores, and its weights if they are rounded to 16 bits."""
    columns = padded(head_dim) + config.block_n + (config.block_n // 2 if itemsize == 2 else 0)
    return int(cdiv(config.block_m * columns, 32 * config.num_warps)) + ADDRESS_REGISTERS


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers: accumulator, scores and weights; shared memory: queries and staged keys and values, as in online.

    Causal programs differ in their work, so `tensor_flops` is 0.
    """
    B, T, H, D = (int(case[key]) for key in ("B", "T", "H", "D"))
    # wgmma (64 rows and more) reads a stage while others are filled; mma.sync frees a stage at once.
    warpgroup = config.block_m >= 64 and scheme.activation != torch.float32
    held = config.num_stages if warpgroup else config.num_stages - 1
    tiles = 2 * held if config.num_stages > 1 else 1
    return Footprint(
        threads=32 * config.num_warps,
        registers=registers(config, D, scheme.activation.itemsize),
        shared_bytes=(config.block_m + tiles * config.block_n) * padded(D) * scheme.activation.itemsize,
        ctas=cdiv(T, config.block_m) * B * H,
    )


def tma_choice(head_dim: int) -> Config:
    """128 rows, with as many keys and stages as shared memory and registers hold; for a narrow head two CTAs fit on an
    SM, and their products and exponentials overlap."""
    width = padded(head_dim)
    if width <= 64:
        return Config(128, 64, num_warps=8, num_stages=3)
    return Config(128, 128 if width == 128 else 64, num_warps=8, num_stages=2)


def tma_footprint(config: Config, case: Case, ctas: int) -> Footprint:
    """Like `footprint`, with every stage of keys and values in memory, and `ctas` CTAs per sequence."""
    D = padded(int(case["D"]))
    rows = config.block_m + 2 * config.num_stages * config.block_n
    return Footprint(
        threads=32 * config.num_warps,
        registers=registers(config, D, TMA_OPERAND_BYTES),
        shared_bytes=rows * D * TMA_OPERAND_BYTES,
        ctas=ctas * int(case["B"]),
    )


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its tiles of queries; keys before every window are not
    read."""
    q, k, window = inputs.q, inputs.k, inputs.window
    T, S = q.shape[1], k.shape[1]
    keys_read = S if window is None else min(S, T - 1 + window)
    lse = 4 * q.numel() // max(1, q.shape[-1]) if inputs.return_lse else 0
    return Traffic(nbytes(q) + nbytes(k, inputs.v) * keys_read / max(1, S) + nbytes(inputs.sinks), nbytes(q) + lse)


def section_heads(k: torch.Tensor, group: int) -> int:
    """Query heads of a section: those of as many heads of keys and values (B, S, H_kv, D) as L2 keeps."""
    head_bytes = 2 * k.shape[1] * k.shape[3] * k.element_size()
    return max(1, SECTION_BYTES // head_bytes) * group

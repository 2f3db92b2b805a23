"""The configs of mla_decode/split_kv, what a CTA holds, and how many splits a sequence's keys have."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme

ADDRESS_REGISTERS = 40
"""For pointers, masks and the running maximum and sum, in addition to accumulator and scores."""
MOST_SPLITS = 64
LEAST_KEYS = 256
"""Least keys per split: with fewer the merge costs more than the split gains.  Writing and reading a part of 64 heads
moves the bytes of 230 keys."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """One way to launch the kernel: heads and keys per tile, warps, pipeline stages."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles of 16 to 64 heads, with pipelines of several depths."""
    return tuple(itertools.starmap(Config, itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (1, 2, 3))))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers: accumulator and scores; shared memory: queries and staged latents."""
    latent, rotary = int(next_power_of_2(int(case["latent"]))), int(next_power_of_2(int(case["rotary"])))
    threads = 32 * config.num_warps
    tiles = max(1, config.num_stages - 1 if config.block_h < 64 else config.num_stages)
    heads = cdiv(int(case["H"]), config.block_h)
    return Footprint(
        threads=threads,
        registers=cdiv(config.block_h * (latent + config.block_n), threads) + ADDRESS_REGISTERS,
        shared_bytes=(config.block_h + tiles * config.block_n) * (latent + rotary) * scheme.activation.itemsize,
        ctas=int(case["B"]) * heads,
    )


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By the number of heads: wgmma for tiles of 64 heads, mma.sync for 16 or 32.  64 heads by 64 keys would spill.

    Three stages: with two, a step's latents are loaded when the products before it end, and nothing hides the loads.
    """
    H = int(case["H"])
    if H > 32:
        return Config(64, 32, num_warps=8, num_stages=3)
    return Config(16, 32, num_warps=4, num_stages=3) if H <= 16 else Config(32, 64, num_warps=8, num_stages=3)


SPLIT_KV = Tuning(Config, configs, heuristic, footprint)


@lru_cache
def split_count(ctas: int, most_keys: int, sms: int) -> int:
    """The number of splits with which the waves of CTAs take least time, counted in keys (a part costs `LEAST_KEYS`);
    splits of the longest sequence that a table can hold have at least `LEAST_KEYS` keys."""

    def keys(splits: int) -> int:
        return -(-ctas * splits // sms) * (-(-most_keys // splits) + (LEAST_KEYS if splits > 1 else 0))

    return min(range(1, max(1, min(most_keys // LEAST_KEYS, MOST_SPLITS)) + 1), key=keys)

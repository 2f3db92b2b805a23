"""The configs of paged_attention: what a CTA needs, and at the end a row of defaults for each rung."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from rooflab.kernels._attention_configs import ADDRESS_REGISTERS, Config, padded, registers, staged_tiles
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.paged_attention._split_work import UNIT, ring_bytes, rows_of_tile, virtual_heads
from rooflab.kernels.tuning import BF16, SHARED_BYTES_PER_CTA, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme

SM_SHARED_BYTES = 228 * 1024
CTA_RESERVE = 1024
"""Shared memory of an SM, and what each CTA takes of it by itself (CUDA C++ Programming Guide)."""
OTHER_REGISTERS = 40
"""Least registers of a warp of split_kv for cursors, addresses, scores and weights."""


@dataclass(frozen=True)
class StepConfig(LaunchConfig):
    """One way to launch the kernel: keys per step, warps, pipeline stages."""

    block_n: int
    num_warps: int
    num_stages: int


def _gqa_configs(case: Case, scheme: Scheme = BF16) -> tuple[StepConfig, ...]:
    """Steps of keys with pipelines of several depths, because a decode step needs bytes in flight.  At most 32 keys per
    warp, and 8 in fp32, whose FMAs hold their operands in registers: more spill up to 15 KB per thread (read in the
    compiled kernels)."""
    most = 8 if scheme.activation == torch.float32 else 32
    all_configs = itertools.starmap(StepConfig, itertools.product((16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 3, 4, 5)))
    return tuple(config for config in all_configs if config.block_n <= most * config.num_warps)


def _gqa_footprint(config: StepConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers: the group's accumulator and scores; shared memory: queries and staged keys and values, as Triton
    allocates them (read in the compiled kernels; tests/test_configs.py compares them)."""
    B, H, H_kv, D = (int(case[key]) for key in ("B", "H", "H_kv", "D"))
    threads = 32 * config.num_warps
    rows = packed_rows(H, H_kv)
    # The load of a key waits for the load of its table entry, so both divide the stages.
    tiles = 2 * max(1, (config.num_stages - 1) // 2) if config.num_stages > 1 else 1
    return Footprint(
        threads=threads,
        registers=cdiv(rows * (D + config.block_n), threads) + ADDRESS_REGISTERS,
        shared_bytes=(rows + tiles * config.block_n) * D * scheme.activation.itemsize,
        ctas=B * H_kv,
    )


def _gqa_default(case: Case, scheme: Scheme = BF16) -> StepConfig:
    """By head_dim and bytes of a value: a step whose staged keys and values fit in an SM's shared memory."""
    D = int(case["D"])
    if scheme.activation == torch.float32:
        # fp32 products are FMAs, whose operands fill the registers: a wider tile spills (read in the SASS).
        return StepConfig(32 if D <= 128 else 16, num_warps=4 if D <= 64 else 8, num_stages=1)
    return StepConfig(64, num_warps=4 if D <= 128 else 8, num_stages=3 if D <= 128 else 2)


def packed_rows(H: int, H_kv: int) -> int:
    """Rows of a program's product: its group's query heads, at least the 16 of a matrix instruction."""
    return max(16, int(next_power_of_2(H // H_kv)))


def _chunked_configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles of up to 16 rows per warp, with pipelines of several depths; 8 warps from 64 rows on.  In fp32 8 warps from
    32 keys on for a wide head: 4 warps spill 0.5 to 1.2 KB per thread (read in the compiled kernels)."""
    if scheme.activation == torch.float32:
        all_configs = itertools.starmap(Config, itertools.product((16, 32), (16, 32), (4, 8), (1, 2)))
        narrow = int(case["D"]) <= 64
        return tuple(config for config in all_configs if narrow or (config.block_n, config.num_warps) != (32, 4))
    sides = itertools.product(((16, 4), (32, 4), (64, 4), (64, 8), (128, 8)), (32, 64, 128), (1, 2, 3, 4))
    return tuple(Config(block_m, block_n, warps, stages) for (block_m, warps), block_n, stages in sides)


def _chunked_footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers: fp32 accumulator and a tile of scores; shared memory: queries and staged keys and values, as Triton
    allocates them.  head_dim is padded to a power of two."""
    B, H, H_kv = (int(case[key]) for key in ("B", "H", "H_kv"))
    head = padded(int(case["D"]))
    staged = staged_tiles(config, scheme) * config.block_n * head * scheme.weight.itemsize
    return Footprint(
        threads=32 * config.num_warps,
        registers=registers(config, head),
        shared_bytes=config.block_m * head * scheme.activation.itemsize + staged,
        ctas=tiles_at_most(B * int(case.get("queries", 1)), B, H // H_kv, config.block_m) * H_kv,
    )


def _chunked_default(case: Case, scheme: Scheme = BF16) -> Config:
    """A tile whose fp32 accumulator and staged keys fit on an SM, with few rows if sequences have few on average."""
    D, rows = int(case["D"]), int(case.get("queries", 1)) * int(case["H"]) // int(case["H_kv"])
    if scheme.activation == torch.float32:
        # fp32 products are FMAs, whose operands fill the registers: a wider tile spills (read in the SASS).
        return Config(32 if rows > 16 else 16, 32 if D <= 64 else 16, 4 if D <= 64 else 8, num_stages=1)
    block_m = min(max(int(next_power_of_2(rows)), 16), 128)
    if block_m == 128:
        return Config(128, 64 if D <= 128 else 32, num_warps=8, num_stages=3 if D <= 128 else 2)
    return Config(block_m, 64, num_warps=4, num_stages=3 if D <= 128 else 2)


def tiles_at_most(T: int, B: int, group: int, block_m: int) -> int:
    """The most tiles of T queries in B sequences: each sequence may have one tile that is not full."""
    return T * group // block_m + B


@dataclass(frozen=True)
class SplitConfig:
    """How the keys are divided, and how many are in flight."""

    warps: int
    """Warps per CTA, each with its own head; their number divides the heads."""
    num_stages: int
    """Units of a warp's ring."""
    ctas_per_sm: int
    least: int
    """Units of the smallest share; large enough to hide the cost of writing and adding a part."""
    bulk: bool = False
    """Whether one more warp copies a token's keys of all the CTA's heads at once, and its values, for a ring that the
    warps share; where heads are neighbours in the cache."""


def heads_of(case: Case) -> int:
    """Warps for all heads of a key."""
    return virtual_heads(int(case["H"]), int(case["H_kv"]))


def _split_configs(case: Case, scheme: Scheme = BF16) -> tuple[SplitConfig, ...]:
    """Every number of warps up to 8 that divides the heads, with rings and CTAs for at least four warps per SM."""
    divisors = [warps for warps in range(1, 9) if heads_of(case) % warps == 0]
    sizes = itertools.product(divisors, (2, 3, 4, 6), (1, 2, 4, 8), (2, 4, 16), (False, True))
    return tuple(config for config in itertools.starmap(SplitConfig, sizes) if config.warps * config.ctas_per_sm >= 4)


def _split_footprint(config: SplitConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Needs of the first launch: registers for accumulators and queries, shared memory for the warps' rings."""
    D, context, group = int(case["D"]), int(case["context"]), int(case["H"]) // int(case["H_kv"])
    keys = min(context, int(case.get("window", 0)) or context)
    units = int(case["B"]) * (heads_of(case) // config.warps) * -(-keys // UNIT)
    return Footprint(
        threads=32 * (config.warps + config.bulk),
        registers=D // 2 + D // (8 if group <= 8 else 4 if D <= 128 else 64) + OTHER_REGISTERS,
        shared_bytes=ring_bytes(config.warps, config.num_stages, D, group, scheme, config.bulk)
        + config.bulk * 2 * config.num_stages * BARRIER_BYTES,
        ctas=max(min(HOPPER_SMS * config.ctas_per_sm, units // config.least), 1),
    )


def _is_split(config: SplitConfig, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether the warps divide the heads, with `bulk` into whole KV heads, and `ctas_per_sm` CTAs fit on an SM."""
    needs = _split_footprint(config, case.but(context=0), scheme)
    shared = config.ctas_per_sm * (needs.shared_bytes + CTA_RESERVE) <= SM_SHARED_BYTES
    threads = config.ctas_per_sm * needs.threads
    # Of nine warps the assembler takes twelve for the registers that each may have (read in the compiled kernels).
    counted = config.ctas_per_sm * cdiv(needs.threads, 128) * 128 if config.bulk else threads
    held = needs.registers * counted <= 65536 and threads <= 2048
    whole = not config.bulk or config.warps % rows_of_tile(int(case["H"]) // int(case["H_kv"]))[1] == 0
    return needs.fits and heads_of(case) % config.warps == 0 and whole and shared and held


def _split_default(case: Case, scheme: Scheme = BF16) -> SplitConfig:
    """Neighbouring heads in a CTA, because their keys are neighbours in a page; then the deepest ring that fits.

    8 warps per SM hide one another's softmax, 16 if the head is short; fewer if a ring would have less than 3 units.
    """
    D, heads, group = int(case["D"]), heads_of(case), int(case["H"]) // int(case["H_kv"])
    for wanted in (16, 8, 4, 2, 1) if D <= 64 else (8, 4, 2, 1):
        warps = max(count for count in range(1, min(wanted, 8) + 1) if heads % count == 0)
        ctas = wanted // warps
        room = min(SM_SHARED_BYTES // ctas - CTA_RESERVE, SHARED_BYTES_PER_CTA)
        stages = max(n for n in range(1, 9) if n == 1 or ring_bytes(warps, n, D, group, scheme) <= room)
        if stages >= 3:
            break
    return SplitConfig(warps, stages, ctas, least=4)


GQA_PACKED = Tuning(StepConfig, _gqa_configs, _gqa_default, _gqa_footprint)
CHUNKED = Tuning(Config, _chunked_configs, _chunked_default, _chunked_footprint)
SPLIT_KV = Tuning(SplitConfig, _split_configs, _split_default, _split_footprint, _is_split)

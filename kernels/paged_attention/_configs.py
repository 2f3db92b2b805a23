"""Holds the configs of paged_attention's kernels, the resources of a CTA, and the tables of default configs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooflab.kernels._attention_configs import ADDRESS_REGISTERS, Config, pointers_footprint
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class StepConfig(LaunchConfig):
    """Holds the launch options of `gqa_packed`: keys per step, warps, and pipeline stages."""

    block_n: int
    num_warps: int
    num_stages: int


STEP_CONFIGS = space(StepConfig, block_n=(16, 32, 64, 128), num_warps=(1, 2, 4, 8), num_stages=(1, 2, 3, 4, 5))
TILE_CONFIGS = space(
    Config, block_m=(16, 32, 64, 128), block_n=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3, 4)
)
FMA_CONFIGS = space(Config, block_m=(16, 32), block_n=(16, 32), num_warps=(4, 8), num_stages=(1, 2))


def _gqa_configs(case: Case, scheme: Scheme = BF16) -> tuple[StepConfig, ...]:
    """Returns configs with pipelines of several depths, because a decode step needs many bytes in flight.

    A warp has at most 32 keys per step, or 8 in fp32.  With more keys in fp32, up to 15 KB per thread would spill (read
    in the compiled kernels)."""
    max_keys = 8 if scheme.activation == torch.float32 else 32
    return tuple(config for config in STEP_CONFIGS(case) if config.block_n <= max_keys * config.num_warps)


def _gqa_footprint(config: StepConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the registers for the accumulator and the scores of a group, and the shared memory for queries, keys and
    values. Triton allocates these amounts (read in the compiled kernels).  tests/contracts/test_configs.py compares
    them."""
    B, H, H_kv, D = (int(case[size_name]) for size_name in ("B", "H", "H_kv", "D"))
    cta_threads = 32 * config.num_warps
    rows = packed_rows(H, H_kv)
    # The load of a key waits for the load of its table entry, so both divide the stages.
    tiles = 2 * max(1, (config.num_stages - 1) // 2) if config.num_stages > 1 else 1
    return Footprint(
        threads=cta_threads,
        registers=cdiv(rows * (D + config.block_n), cta_threads) + ADDRESS_REGISTERS,
        shared_bytes=(rows + tiles * config.block_n) * D * scheme.activation.itemsize,
        ctas=B * H_kv,
    )


def packed_rows(H: int, H_kv: int) -> int:
    """Returns the number of rows of a program's matmul: a group's query heads, but at least 16 for tensor cores."""
    return max(16, int(next_power_of_2(H // H_kv)))


def _chunked_configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Returns the configs to try.  In 16 bits, a warp has at most 16 rows, and a config with 8 warps has at least 64
    rows.

    In fp32 with a head size above 64, configs with 4 warps and blocks of 32 keys are left out.  Their compiled code
    spills 0.5 to 1.2 KB per thread."""
    if scheme.activation == torch.float32:
        has_narrow_heads = int(case["D"]) <= 64
        return tuple(c for c in FMA_CONFIGS(case) if has_narrow_heads or (c.block_n, c.num_warps) != (32, 4))
    return tuple(
        c for c in TILE_CONFIGS(case) if c.block_m <= 16 * c.num_warps and (c.num_warps == 4 or c.block_m >= 64)
    )


def _chunked_footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    B, H, H_kv = (int(case[size_name]) for size_name in ("B", "H", "H_kv"))
    ctas = tiles_at_most(B * int(case.get("queries", 1)), B, H // H_kv, config.block_m) * H_kv
    return pointers_footprint(config, case, scheme, ctas, weights=False)


def _chunked_sizes(case: Case, scheme: Scheme) -> dict[str, int]:
    """Returns the size that selects a default config: `rows`, the number of (query, head) pairs per sequence and KV
    head. All sequences have the same number of queries."""
    return {"rows": int(case.get("queries", 1)) * int(case["H"]) // int(case["H_kv"])}


def tiles_at_most(T: int, B: int, group: int, block_m: int) -> int:
    """Returns the largest number of tiles for T queries in B sequences.  Each sequence may end in a partial tile."""
    return T * group // block_m + B


# A step whose staged keys and values fit in an SM's shared memory.  fp32 products are FMAs, whose operands fill the
# registers: a wider tile spills (read in the SASS).
GQA_DEFAULTS = Defaults(
    (
        ({"itemsize": 2, "D": 128}, StepConfig(64, num_warps=4, num_stages=3)),
        ({"itemsize": 2}, StepConfig(64, num_warps=8, num_stages=2)),
        ({"D": 64}, StepConfig(32, num_warps=4, num_stages=1)),
        ({"D": 128}, StepConfig(32, num_warps=8, num_stages=1)),
        ({}, StepConfig(16, num_warps=8, num_stages=1)),
    )
)
# Few rows if sequences have few; otherwise the largest tile whose accumulator and staged keys fit on an SM.
CHUNKED_DEFAULTS = Defaults(
    (
        *(
            ({"itemsize": 2, "D": 128, "rows": rows}, Config(rows, 64, num_warps=4, num_stages=3))
            for rows in (16, 32, 64)
        ),
        ({"itemsize": 2, "D": 128}, Config(128, 64, num_warps=8, num_stages=3)),
        *(({"itemsize": 2, "rows": rows}, Config(rows, 64, num_warps=4, num_stages=2)) for rows in (16, 32, 64)),
        ({"itemsize": 2}, Config(128, 32, num_warps=8, num_stages=2)),
        ({"D": 64, "rows": 16}, Config(16, 32, num_warps=4, num_stages=1)),
        ({"D": 64}, Config(32, 32, num_warps=4, num_stages=1)),
        ({"rows": 16}, Config(16, 16, num_warps=8, num_stages=1)),
        ({}, Config(32, 16, num_warps=8, num_stages=1)),
    ),
    _chunked_sizes,
)
GQA_PACKED_TUNING = Tuning(StepConfig, _gqa_configs, GQA_DEFAULTS, _gqa_footprint)
CHUNKED_TUNING = Tuning(Config, _chunked_configs, CHUNKED_DEFAULTS, _chunked_footprint)

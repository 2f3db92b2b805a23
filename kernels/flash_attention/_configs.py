"""The tiles of flash_attention's Triton kernels: each rung's default by head_dim, its configs, and what a CTA needs.

A causal mask makes programs differ in their work, so no footprint gives `tensor_flops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from rooflab.kernels import _attention_configs as tiles
from rooflab.kernels._attention_configs import Config, padded, staged_tiles
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class PersistentConfig(Config):
    """Also the CTAs of an SM."""

    ctas_per_sm: int
    host_only = ("ctas_per_sm",)


DEFAULTS: dict[str, dict[int, Config]] = {
    # Widest head_dim:     64                         128                         256
    "online, fp32":       {64: Config(32, 32, 4, 1),  128: Config(32, 32, 8, 1),  256: Config(32, 32, 8, 1)},
    "masked_tiles, fp32": {64: Config(32, 32, 4, 1),  128: Config(32, 32, 8, 1),  256: Config(32, 16, 8, 1)},
    "online":             {64: Config(128, 64, 4, 2), 128: Config(128, 64, 8, 2), 256: Config(64, 64, 8, 2)},
    "masked_tiles":       {64: Config(128, 64, 4, 2), 128: Config(128, 64, 8, 2), 256: Config(64, 64, 8, 2)},
    "tma":                {64: Config(128, 64, 8, 3), 128: Config(128, 128, 8, 2), 256: Config(128, 64, 8, 2)},
    "fp8":                {64: Config(64, 128, 4, 2), 128: Config(64, 128, 4, 2), 256: Config(64, 64, 4, 2)},
}  # fmt: skip
"""By rung: block_m, block_n, num_warps and num_stages that an SM's registers and shared memory hold.

fp32 products are FMAs, whose operands fill the registers: a wider tile spills (read in the SASS).  tma's two CTAs of a
narrow head fit on an SM together, and their products and exponentials overlap; packed_gqa and persistent have its
tiles.  fp8 has one warpgroup of 64 rows, so that the exponentials of one of two or three CTAs run under the products of
another; 128 rows would read half the bytes from L2, but only one CTA would fit, whose steps wait for each other.
"""
FMA_OUTPUTS = 38
"""fp32 values of accumulator and scores per thread; FMAs hold their operands in registers too: with more, at a head_dim
of 128, nearly all tiles spill 0.5 to 13 KB per thread (read in the compiled kernels)."""
TMA_OPERAND_BYTES = 2
"""Bytes of a value in the kernels from tma on."""
WIDEST_FP8 = 128
"""Widest head_dim for which a tile's products and the sums fit in registers together (read in the SASS)."""


def default(rung: str, head_dim: int) -> Config:
    """The rung's tile for a head_dim; beyond 256 that of 256."""
    return next((tile for width, tile in DEFAULTS[rung].items() if head_dim <= width), DEFAULTS[rung][256])


def by_pointers(rung: str, weights: bool = True, others: int = tiles.ADDRESS_REGISTERS) -> Tuning:
    """The tuning of a rung that loads by pointers; `weights` and `others` are those of `registers`."""

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
        """Tiles that the warps divide evenly, with pipelines of several depths."""
        if scheme.activation == torch.float32:
            columns = padded(int(case["D"]))
            every = itertools.starmap(Config, itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (1, 2)))
            return tuple(c for c in every if c.block_m * (columns + c.block_n) <= FMA_OUTPUTS * 32 * c.num_warps)
        return tuple(itertools.starmap(Config, itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))))

    def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
        return default(f"{rung}, fp32" if scheme.activation == torch.float32 else rung, int(case["D"]))

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        """In shared memory the queries, and staged keys and values."""
        D, rounded = padded(int(case["D"])), weights and scheme.activation.itemsize == 2
        rows = config.block_m + staged_tiles(config, scheme) * config.block_n
        return Footprint(
            threads=32 * config.num_warps,
            registers=tiles.registers(config, D, rounded, others),
            shared_bytes=rows * D * scheme.activation.itemsize,
            ctas=cdiv(int(case["T"]), config.block_m) * int(case["B"]) * int(case["H"]),
        )

    return Tuning(Config, configs, heuristic, footprint)


def _tma_configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles for wgmma, with pipelines of several depths; 128 rows on four warps only for a head_dim up to 64, because
    wider ones spill (read in the compiled kernels)."""
    every = itertools.starmap(Config, itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)))
    narrow = padded(int(case["D"])) <= 64
    return tuple(config for config in every if narrow or (config.block_m, config.num_warps) != (128, 4))


def _by_tma(ctas: Callable[[Config, Case], int]) -> Callable[..., Footprint]:
    """The footprint of a rung that loads by TMA, with every stage of keys and values in memory."""

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        D = padded(int(case["D"]))
        rows = config.block_m + 2 * config.num_stages * config.block_n
        return Footprint(
            threads=32 * config.num_warps,
            registers=tiles.registers(config, D, weights=True),
            shared_bytes=rows * D * TMA_OPERAND_BYTES,
            ctas=ctas(config, case),
        )

    return footprint


def _tiles(config: Config, case: Case) -> int:
    """Tiles of queries of all heads."""
    return cdiv(int(case["T"]), config.block_m) * int(case["H"]) * int(case["B"])


def _tma_default(case: Case, scheme: Scheme = BF16) -> Config:
    return default("tma", int(case["D"]))


def _packed_rows(case: Case) -> tuple[int, int]:
    """Rows per head of keys, and the number of such heads; without `H_kv` no heads share keys."""
    H = int(case["H"])
    H_kv = int(case.get("H_kv", H))
    return int(case["T"]) * (H // H_kv), H_kv


def _packed_tiles(config: Config, case: Case) -> int:
    rows, H_kv = _packed_rows(case)
    return cdiv(rows, config.block_m) * H_kv * int(case["B"])


def _packed_default(case: Case, scheme: Scheme = BF16) -> Config:
    """64 rows if they are enough."""
    tile = _tma_default(case)
    return replace(tile, block_m=64, num_warps=4) if _packed_rows(case)[0] <= 64 else tile


def _persistent_configs(case: Case, scheme: Scheme = BF16) -> tuple[PersistentConfig, ...]:
    """The configs of tma, with one or two CTAs per SM."""
    return tuple(PersistentConfig(**asdict(c), ctas_per_sm=ctas) for c in _tma_configs(case) for ctas in (1, 2))


def _persistent_default(case: Case, scheme: Scheme = BF16) -> PersistentConfig:
    """With the CTAs that fit on an SM."""
    ctas = 2 if padded(int(case["D"])) <= 64 else 1
    return PersistentConfig(**asdict(_tma_default(case)), ctas_per_sm=ctas)


def values_in_fp8(columns: bool, head_dim: int) -> bool:
    """Whether weights and values are multiplied in e4m3, not in fp16."""
    return columns and padded(head_dim) <= WIDEST_FP8


def _fp8_configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """One warpgroup per 64 rows, or per 128 of a narrow head, pipelines of several depths; for a wide head 64 keys,
    because more keys spill (read in the SASS)."""
    width = padded(int(case["D"]))
    shapes = [(64, 4), (128, 8), *([(128, 4)] if width <= 64 else [])]
    keys = (64, 128, 256) if width <= WIDEST_FP8 else (64,)
    return tuple(Config(m, n, warps, stages) for m, warps in shapes for n in keys for stages in (2, 3, 4))


def _fp8_default(case: Case, scheme: Scheme = BF16) -> Config:
    return default("fp8", int(case["D"]))


def _fp8_footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers: the sums, and a tile's products or scores, or scores and their weights in fp16.

    Shared memory: the queries and every stage of keys and values; fp16 values need one more tile, twice as wide.
    """
    D = padded(int(case["D"]))
    in_fp8 = values_in_fp8(bool(case.get("v_columns")), D)
    columns = D + (max(D, config.block_n) if in_fp8 else config.block_n + config.block_n // 2)
    rows = config.block_m + (2 * config.num_stages + (not in_fp8)) * config.block_n
    return Footprint(
        threads=32 * config.num_warps,
        registers=config.block_m * columns // (32 * config.num_warps) + tiles.ADDRESS_REGISTERS,
        shared_bytes=rows * D,
        ctas=_tiles(config, case),
    )


ONLINE = by_pointers("online", weights=False)
MASKED_TILES = by_pointers("masked_tiles")
TMA = Tuning(Config, _tma_configs, _tma_default, _by_tma(_tiles))
PACKED_GQA = Tuning(Config, _tma_configs, _packed_default, _by_tma(_packed_tiles))
PERSISTENT = Tuning(
    PersistentConfig, _persistent_configs, _persistent_default,
    _by_tma(lambda config, case: min(_tiles(config, case), HOPPER_SMS * config.ctas_per_sm)),  # type: ignore[attr-defined]
)  # fmt: skip
FP8 = Tuning(Config, _fp8_configs, _fp8_default, _fp8_footprint)

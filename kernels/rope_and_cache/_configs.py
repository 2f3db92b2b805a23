"""The tiles of heads of rope_and_cache: which are worth a try, what they need, and the default."""

from __future__ import annotations

from rooflab.kernels._head_tiles import Config, tiles
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

ADDRESS_REGISTERS = 28
"""For pointers and masks, in addition to the values and the angles."""
FEW_TOKENS = 64
"""With fewer tokens, programs with a tile of 1024 would not fill the SMs twice."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles of 2 to 16 values of each half per thread."""
    return tiles(128, 16)


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """fp32 registers for both halves of a program's heads, and for their cosines and sines."""
    threads = 32 * config.num_warps
    T, H, H_kv, D = (int(case[key]) for key in ("T", "H", "H_kv", "D"))
    half, *blocks = blocks_of(config, H, H_kv, D)
    ctas = sum(
        cdiv(T, tokens) * cdiv(all_heads, heads) for (tokens, heads), all_heads in zip(blocks, (H, H_kv), strict=True)
    )
    values = half * max(tokens * heads for tokens, heads in blocks)
    return Footprint(threads, cdiv(4 * values, threads) + ADDRESS_REGISTERS, 0, ctas)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """For few tokens smaller tiles, so more programs; for many tokens 16 bytes of each half per thread."""
    return Config(tile=512 if int(case["T"]) < FEW_TOKENS else 1024, num_warps=4)


def blocks_of(config: Config, H: int, H_kv: int, D: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """The tile of a program: at least half of a head; then tokens and heads, of q and of k."""
    half = int(next_power_of_2(cdiv(D, 2)))
    rows = max(config.tile // half, 1)
    q_heads, k_heads = (min(rows, next_power_of_2(max(heads, 1))) for heads in (H, H_kv))
    return half, (rows // q_heads, q_heads), (rows // k_heads, k_heads)


TUNING = Tuning(Config, configs, heuristic, footprint)

"""The Triton rungs of flash_attention: two warpgroups, and tiles of 16 keys so that loops go round their slots often.

The first case's last tile is a row that sees 12 whole tiles, and the second's window leaves none whole: what a loop has
not waited for then meets no wait of the next.
"""

from __future__ import annotations

from mutant_targets.target import Target

TILES = {"block_m": 128, "block_n": 16, "num_warps": 8, "num_stages": 2}


def _cases(T: int, S: int, H: int) -> tuple[str, ...]:
    return tuple(f"B=1,T={T},S={S},H={H},H_kv=1,D=64,causal=true,window={window}" for window in (192, 30))


TARGETS: dict[str, Target] = {
    "flash_masked_tiles": Target("flash_attention", "masked_tiles", _cases(129, 290, 1), {**TILES, "num_stages": 3}),
    "flash_attention_tma": Target("flash_attention", "tma", _cases(129, 290, 1), TILES),
    # 43 positions of 3 heads are a row more than a tile.
    "flash_packed_gqa": Target("flash_attention", "packed_gqa", _cases(43, 250, 3), TILES),
    # Two tiles on one SM.
    "flash_persistent": Target(
        "flash_attention", "persistent", _cases(129, 290, 1), {**TILES, "ctas_per_sm": 1}, (), (("sms", 1),),
    ),
}  # fmt: skip

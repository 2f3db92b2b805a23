"""Attention kernels with tiles of 16 keys, so that loops reuse their slots often.

Cases come in pairs.  In one case, the last tile is a row that sees only whole tiles; in the other, the window leaves no
tile whole.  So if a loop lacks a wait, no wait of the next loop hides it.
"""

from __future__ import annotations

from typing import Any

from mutant_targets.target import BARRIERS, Target

TILES = {"block_m": 128, "block_n": 16, "num_warps": 8, "num_stages": 2}
ONE_SM = (("sms", 1),)
FP8 = (("scheme", "fp8_e4m3"),)


def _flash(kernel: str, T: int, S: int, H: int, options: tuple[tuple[str, Any], ...] = (), **config: int) -> Target:
    cases = tuple(f"B=1,T={T},S={S},H={H},H_kv=1,D=64,causal=true,window={window}" for window in (192, 30))
    return Target("flash_attention", kernel, cases, TILES | config, (), options)


def _windows(op: str, kernel: str, case: str, windows: tuple[int, int], m: int) -> Target:
    config = {"block_m": m, "block_n": 16, "num_warps": 8, "num_stages": 3}
    return Target(op, kernel, tuple(f"{case},window={window}" for window in windows), config)


def _latents(context: int, H: int, rotary: int, h: int, warps: int) -> Target:
    # The second sequence is empty: with 16 heads nothing but the barrier behind the loop stands between the queries and
    # the result.
    config = {"block_h": h, "block_n": 16, "num_warps": warps, "num_stages": 3}
    case = f"B=3,context={context},H={H},latent=64,rotary={rotary},block_size=16,ragged=true,lse=true"
    return Target("mla_decode", "split_kv", (case,), config)


TARGETS: dict[str, Target] = {
    "flash_wgmma": Target(
        "flash_attention", "online", ("B=1,T=128,S=320,H=1,H_kv=1,D=64,causal=false",),
        {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3},
    ),
    "flash_masked_tiles": _flash("masked_tiles", 129, 290, 1, num_stages=3),
    "flash_attention_tma": _flash("tma", 129, 290, 1),
    # 43 positions of 3 heads are a row more than a tile.
    "flash_packed_gqa": _flash("packed_gqa", 43, 250, 3),
    # Two tiles on one SM.
    "flash_persistent": _flash("persistent", 129, 290, 1, ONE_SM, ctas_per_sm=1),
    # 32 keys are the least that wgmma multiplies in e4m3.
    "flash_fp8_columns": Target(
        "flash_attention", "fp8",
        tuple(f"B=1,T={T},S=290,H=1,H_kv=1,D=64,causal=true,window={window},v_columns=true"
              for T, window in ((129, 192), (120, 9))),
        TILES | {"block_n": 32}, (), FP8,
    ),
    # Two tiles on one SM, rings of two slots round several times.
    "flash_ping_pong": Target(
        "flash_attention", "ping_pong", ("B=1,T=136,S=280,H=1,H_kv=1,D=64,causal=true,lse=true",),
        {"block_n": 64, "stages": 2, "consumers": 2}, (), (*ONE_SM, ("without", BARRIERS)),
    ),
    "paged_5_stages": Target(
        "paged_attention", "gqa_packed", ("B=2,context=400,H=4,H_kv=2,D=64,block_size=16,ragged=true",),
        {"block_n": 32, "num_warps": 4, "num_stages": 5},
        ("drop cp.async.wait_group 1", "one more pending in cp.async.wait_group 3", "drop cp.async.commit_group 6"),
    ),
    # Three shares of 7 units: each has a part of a sequence, and one a whole one.
    "paged_split_kv": Target(
        "paged_attention", "split_kv", ("B=2,context=100,H=4,H_kv=2,D=64,block_size=16,ragged=true,lse=true",),
        {"warps": 2, "num_stages": 3, "ctas_per_sm": 1, "least": 3},
    ),
    # The second sequence's one query meets no diagonal.
    "chunked_wgmma": _windows(
        "paged_attention", "chunked",
        "B=2,context=240,H=4,H_kv=1,D=64,block_size=16,ragged=false,queries=33,mixed=true", (110, 30), 128,
    ),
    # Three tiles on one SM; the diagonal of one ends blocks before its sequence does.
    "tma_pages": Target(
        "paged_attention", "tma_pages",
        ("B=2,context=490,H=1,H_kv=1,D=64,block_size=32,ragged=false,queries=200,mixed=true,window=200",),
        {"block_n": 64, "stages": 2}, (), (*ONE_SM, ("without", BARRIERS)),
    ),
    "varlen_wgmma": _windows(
        "flash_attention_varlen", "online", "B=2,T=129,S=322,H=1,H_kv=1,D=64,causal=true", (192, 32), 128,
    ),
    # Two splits, which a second launch merges.
    "latents_16_heads": _latents(500, 3, 16, 16, 4),
    "latents_64_heads": _latents(150, 64, 64, 64, 8),
    "merge_states": Target("merge_attention_states", "fused", ("P=5,T=4,H=3,D=128,empty=true",)),
}  # fmt: skip

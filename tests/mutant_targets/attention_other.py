"""Attention of sequences side by side and over latents, and the merging of its parts."""

from __future__ import annotations

from mutant_targets.target import Target


def _varlen(T: int, S: int, windows: tuple[int, int], warps: int) -> Target:
    # As in `attention_flash`: the first sequence's last row, a tile of its own, sees whole tiles of keys alone, and the
    # narrow window leaves none whole.
    case = f"B=2,T={T},S={S},H=1,H_kv=1,D=64,causal=true"
    config = {"block_m": T - 1, "block_n": 16, "num_warps": warps, "num_stages": 3}
    return Target("flash_attention_varlen", "online", tuple(f"{case},window={window}" for window in windows), config)


def _latents(context: int, H: int, rotary: int, h: int, warps: int, stages: int) -> Target:
    # The second sequence is empty: with 16 heads nothing but the barrier behind the loop stands between the queries and
    # the result.
    config = {"block_h": h, "block_n": 16, "num_warps": warps, "num_stages": stages}
    case = f"B=3,context={context},H={H},latent=64,rotary={rotary},block_size=16,ragged=true,lse=true"
    return Target("mla_decode", "split_kv", (case,), config)


TARGETS: dict[str, Target] = {
    "varlen_wgmma": _varlen(129, 322, (192, 32), 8),
    "varlen_mma": _varlen(33, 170, (96, 32), 4),
    # Two splits, which a second launch merges.
    "latents_16_heads": _latents(500, 3, 16, 16, 4, 3),
    "latents_32_heads": _latents(150, 32, 64, 32, 8, 3),
    "latents_64_heads": _latents(150, 64, 64, 64, 8, 3),
    "latents_16_heads_2_stages": _latents(150, 3, 16, 16, 4, 2),
    "latents_32_heads_2_stages": _latents(150, 32, 64, 32, 8, 2),
    "merge_states": Target("merge_attention_states", "fused", ("P=5,T=4,H=3,D=128,empty=true",)),
}

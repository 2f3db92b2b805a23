"""flash_attention/fp8: values with contiguous keys, multiplied as they are, and values that are converted on the way.

As in `attention_flash` a last tile of one row sees 6 whole tiles; and a narrow window leaves the first loop alone.
"""

from __future__ import annotations

from mutant_targets.attention_flash import TILES
from mutant_targets.target import Target

FP8 = (("scheme", "fp8_e4m3"),)


def _cases(more: str) -> tuple[str, ...]:
    return tuple(
        f"B=1,T={T},S=290,H=1,H_kv=1,D=64,causal=true,window={window}{more}" for T, window in ((129, 192), (120, 9))
    )


TARGETS: dict[str, Target] = {
    # 32 keys are the least that wgmma multiplies in e4m3.
    "flash_fp8_columns": Target("flash_attention", "fp8", _cases(",v_columns=true"), {**TILES, "block_n": 32}, (), FP8),
    "flash_fp8_rows": Target("flash_attention", "fp8", _cases(""), {**TILES, "block_n": 32}, (), FP8),
}

"""The kernel `joined`, for CPUs, calls `rope/joined` and `kv_cache_write/index_copy`.  It needs no C++ compiler."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.kv_cache_write import index_copy
from rooflab.kernels.launcher import kernel
from rooflab.kernels.rope import joined as rope


@kernel(
    backend="torch",
    devices=("cpu",),
    holds={"D == rotary": "heads that are rotated whole"},
    over="naive",
    shows={"": 'calls("joined").total < calls("naive").total'},
)
def joined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Rotates q and k, and writes k and v; skips a negative slot.  Wrong positions or slots raise torch's error."""
    rotated_q, rotated_k = rope.turned(q, k, cos, sin, positions, interleaved)
    q_out.copy_(rotated_q)
    index_copy.write(rotated_k, v, k_cache, v_cache, slot_mapping)

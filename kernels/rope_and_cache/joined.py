"""`joined`, the rung after `naive`, for a CPU without C++ compiler: `rope/joined`, then `kv_cache_write/index_copy`."""

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
    """Rotates and writes; skips a negative slot.  A wrong position or a slot past the caches raises torch's error."""
    turned_q, turned_k = rope.turned(q, k, cos, sin, positions, interleaved)
    q_out.copy_(turned_q)
    index_copy.write(turned_k, v, k_cache, v_cache, slot_mapping)

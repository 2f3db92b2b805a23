"""The kernel `joined`, for a CPU without a C++ compiler, calls `rope/joined` and then `kv_cache_write/index_copy`."""

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
    turned_q, turned_k = rope.turned(q, k, cos, sin, positions, interleaved)
    q_out.copy_(turned_q)
    index_copy.write(turned_k, v, k_cache, v_cache, slot_mapping)

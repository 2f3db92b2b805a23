"""Over naive, for a CPU without a C++ compiler: `rope/joined`, then `kv_cache_write/index_copy`."""

from __future__ import annotations

import torch

from rooflab.kernels._traffic import steps
from rooflab.kernels.kv_cache_write import index_copy
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rope import joined
from rooflab.kernels.rope_and_cache._operands import check_operands
from rooflab.roofline.model import Traffic


def why_not_taken(q: torch.Tensor, cos: torch.Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    return None if 2 * cos.shape[1] == q.shape[-1] else f"rotates whole heads, got {2 * cos.shape[1]} of {q.shape[-1]}"


def traffic(inputs: Arguments) -> Traffic:
    """That of both kernels, and a copy of the rotated queries."""
    size = inputs.q.numel() * inputs.q.element_size()
    parts = (joined.traffic(inputs), index_copy.traffic(inputs), steps((size, size)))
    return Traffic(*(sum(getattr(part, name) for part in parts) for name in ("read_bytes", "write_bytes", "launches")))


@register(
    op="rope_and_cache", name="joined", role="optimized", backend="torch", devices=("cpu",),
    unsupported=lambda inputs: why_not_taken(inputs.q, inputs.cos), traffic=traffic,
)  # fmt: skip
def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """Rotates q into q_out and writes the rotated k, and v, to their slots; skips a negative slot.

    q: (T, H, D); k, v: (T, H_kv, D); cos, sin: (max_position, D/2) fp32; positions, slot_mapping: (T,) int64; k_cache,
    v_cache: (num_blocks, block_size, H_kv, D).  Raises `ValueError` on wrong shapes or dtypes; a position outside the
    tables or a slot outside the caches raises torch's error.
    """
    check_operands(q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping)
    reason = why_not_taken(q, cos)
    if reason:
        raise ValueError(f"cos: {reason}")
    turned_q, turned_k = joined.rope(q, k, cos, sin, positions, interleaved)
    q_out.copy_(turned_q)
    index_copy.kv_cache_write(turned_k, v, k_cache, v_cache, slot_mapping)

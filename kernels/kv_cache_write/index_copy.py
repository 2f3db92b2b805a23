"""Over naive: without mask and selection; if every token has a slot, one `index_copy_` per cache.

For the CPU, where the calls take the time of a decode step, and where reading the slots needs no synchronization.
"""

from __future__ import annotations

import torch

from rooflab.kernels._traffic import steps
from rooflab.kernels.kv_cache_write._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The minimum of the slots, then one scatter per cache; a batch with skipped tokens is compacted first."""
    k, slot_mapping = inputs.k, inputs.slot_mapping
    T, row_bytes = len(slot_mapping), k.shape[1] * k.shape[2] * k.element_size()
    kept = int((slot_mapping >= 0).sum())
    scatter = (kept * (8 + row_bytes), kept * row_bytes)
    if kept == T:
        return steps((8 * T, 0), scatter, scatter)
    return steps((8 * T, 0), (8 * T, 8 * kept), (8 * T, 8 * kept), scatter, scatter, scatter, scatter)


@register(op="kv_cache_write", name="index_copy", role="optimized", backend="torch", devices=("cpu",), traffic=traffic)
def kv_cache_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes k[t] and v[t] to slot_mapping[t] of the caches; skips a negative slot.

    k, v: (T, H_kv, D); k_cache, v_cache: (num_blocks, block_size, H_kv, D), changed; slot_mapping: (T,) int64.  Raises
    `ValueError` on wrong shapes or dtypes, and torch's `IndexError` on a slot past the cache.
    """
    T, _, _ = check_operands(k, v, k_cache, v_cache, slot_mapping)
    # min() takes 1 us, (slot_mapping >= 0).all() takes 2 us.
    if T and int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().flatten()
        k, v, slot_mapping = k.index_select(0, kept), v.index_select(0, kept), slot_mapping.index_select(0, kept)
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)

"""Index assignment over the tokens that have a slot."""

from __future__ import annotations

import torch

from rooflab.kernels._traffic import steps
from rooflab.kernels.kv_cache_write._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The mask, then three selections by it (each first compacts the mask to indices), then two scatters."""
    k, slot_mapping = inputs.k, inputs.slot_mapping
    T, row_bytes = len(slot_mapping), k.shape[1] * k.shape[2] * k.element_size()
    kept = int((slot_mapping >= 0).sum())
    compact = (T, 8 * kept)
    scatter = (8 * kept + kept * row_bytes, kept * row_bytes)
    return steps(
        (8 * T, T),  # mask
        compact,
        (16 * kept, 8 * kept),  # slots
        compact,
        scatter,  # k[keep]
        scatter,  # into the cache
        compact,
        scatter,
        scatter,
    )


@register(op="kv_cache_write", name="naive", role="naive", backend="torch", traffic=traffic)
def kv_cache_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes k[t] and v[t] to slot_mapping[t] of the caches; skips a negative slot.

    k, v: (T, H_kv, D); k_cache, v_cache: (num_blocks, block_size, H_kv, D), changed; slot_mapping: (T,) int64.  Raises
    `ValueError` on wrong shapes or dtypes, and torch's error on a slot past the cache.
    """
    check_operands(k, v, k_cache, v_cache, slot_mapping)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    k_cache.flatten(0, 1)[slots] = k[keep]
    v_cache.flatten(0, 1)[slots] = v[keep]

"""Index assignment over the tokens that have a slot."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
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


@kernel(backend="torch", traffic=traffic)
def naive(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Skips a negative slot; a slot past the cache raises torch's error."""
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    k_cache.flatten(0, 1)[slots] = k[keep]
    v_cache.flatten(0, 1)[slots] = v[keep]

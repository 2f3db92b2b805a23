"""Over naive: without mask and selection; if every token has a slot, one `index_copy_` per cache.

For the CPU, where the calls take the time of a decode step, and where reading the slots needs no synchronization.
"""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
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


@kernel(backend="torch", devices=("cpu",), traffic=traffic)
def index_copy(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Skips a negative slot; a slot past the cache raises torch's `IndexError`."""
    write(k, v, k_cache, v_cache, slot_mapping)


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes k[t] and v[t] to slot_mapping[t] of the caches."""
    # min() takes 1 us, (slot_mapping >= 0).all() takes 2 us.
    if int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().flatten()
        k, v, slot_mapping = k.index_select(0, kept), v.index_select(0, kept), slot_mapping.index_select(0, kept)
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)

"""The kernel `naive` writes by index assignment, for the tokens that have a slot."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes `k` and `v` to their slots.  Skips a negative slot.  A slot past the cache raises torch's error."""
    has_slot = slot_mapping >= 0
    slots = slot_mapping[has_slot]
    k_cache.flatten(0, 1)[slots] = k[has_slot]
    v_cache.flatten(0, 1)[slots] = v[has_slot]

"""Checks of the operands of all kv_cache_write kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, check_float, check_last_dim_contiguous, check_slots
from rooflab.reference.kv_cache_write import check_shapes
from rooflab.reference.rules import check_dtype


def check_operands(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> tuple[int, int, int]:
    """T, H_kv and D.

    Raises `ValueError` unless k and v are (T, H_kv, D), the caches contiguous (num_blocks, block_size, H_kv, D), all of
    one float dtype, slot_mapping (T,) int64, all on one device.  k and v may be strided views of a packed projection.
    """
    check_shapes(k, v, k_cache, v_cache, slot_mapping)
    T, H_kv, D = k.shape
    check_float("k", k)
    for name, tensor in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, tensor, k.dtype)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    for name, tensor in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache), ("slot_mapping", slot_mapping)):
        if tensor.device != k.device:
            raise ValueError(f"{name}: expected a tensor on {k.device}, got {tensor.device}")
    check_last_dim_contiguous("slot_mapping", slot_mapping)
    check_last_dim_contiguous("k", k)
    check_last_dim_contiguous("v", v)
    check_contiguous("k_cache", k_cache)
    check_contiguous("v_cache", v_cache)
    check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
    return T, H_kv, D

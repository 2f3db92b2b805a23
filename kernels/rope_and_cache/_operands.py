"""Checks of the operands of all rope_and_cache kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rooflab.kernels._checks import check_contiguous, check_float, check_last_dim_contiguous, check_slots, check_values
from rooflab.reference.rules import check_dtype, check_shape


class RopeSizes(NamedTuple):
    """Sizes of one call; `rotary` is R, the number of rotated columns."""

    T: int
    H: int
    H_kv: int
    D: int
    rotary: int


def check_operands(
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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> RopeSizes:
    """The sizes.

    Raises `ValueError` unless q and q_out are (T, H, D), k and v (T, H_kv, D) of one float dtype, cos and sin
    (max_position, R/2) fp32 with R <= D, positions and slot_mapping (T,) int64, the caches contiguous (num_blocks,
    block_size, H_kv, D) of the same dtype (e4m3 if both scales, (H_kv,) fp32, are given), q_norm and k_norm (D,) of q's
    dtype or None, all on one device.  q, k, v and q_out may be strided views.
    """
    check_shape("q", q, None, None, None)
    T, H, D = q.shape
    check_shape("k", k, T, None, D)
    H_kv = k.shape[1]
    check_shape("v", v, *k.shape)
    check_shape("q_out", q_out, *q.shape)
    check_float("q", q)
    check_shape("cos", cos, None, None)
    check_shape("sin", sin, *cos.shape)
    if 2 * cos.shape[1] > D:
        raise ValueError(f"cos: expected at most {D // 2} columns, half of q's head_dim, got {cos.shape[1]}")
    check_shape("k_cache", k_cache, None, None, H_kv, D)
    check_shape("v_cache", v_cache, *k_cache.shape)
    if (k_scale is None) != (v_scale is None):
        raise ValueError(f"{'v' if v_scale is None else 'k'}_scale: expected both scales or none, got one")
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{'k' if k_norm is None else 'q'}_norm: expected both norms or none, got one")
    cached = q.dtype if k_scale is None else torch.float8_e4m3fn
    for name, tensor, dtype in (
        ("k", k, q.dtype), ("v", v, q.dtype), ("q_out", q_out, q.dtype),
        ("k_cache", k_cache, cached), ("v_cache", v_cache, cached),
        ("cos", cos, torch.float32), ("sin", sin, torch.float32),
    ):  # fmt: skip
        check_dtype(name, tensor, dtype)
        check_last_dim_contiguous(name, tensor)
    check_last_dim_contiguous("q", q)
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_shape(name, tensor, T)
        check_dtype(name, tensor, torch.int64)
        check_contiguous(name, tensor)
    vectors = {"k_scale": k_scale, "v_scale": v_scale, "q_norm": q_norm, "k_norm": k_norm}
    for name, vector in vectors.items():
        if vector is not None:
            is_scale = name.endswith("scale")
            check_shape(name, vector, H_kv if is_scale else D)
            check_dtype(name, vector, torch.float32 if is_scale else q.dtype)
            check_contiguous(name, vector)
    check_contiguous("k_cache", k_cache)
    check_contiguous("v_cache", v_cache)
    others = {
        "k": k, "v": v, "cos": cos, "sin": sin, "positions": positions, "q_out": q_out, "k_cache": k_cache,
        "v_cache": v_cache, "slot_mapping": slot_mapping, **vectors,
    }  # fmt: skip
    for name, other in others.items():
        if other is not None and other.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {other.device}")
    check_values("positions", positions, 0, cos.shape[0] - 1)
    check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
    return RopeSizes(T, H, H_kv, D, 2 * cos.shape[1])

"""Checks of the arguments of all flash_attention kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_dtype, check_float, check_last_dim_contiguous, check_shape

E4M3 = torch.float8_e4m3fn


def check_args(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, fp8: bool = False) -> None:
    """Raises `ValueError` unless q is (B, T, H, D) and k, v (B, S, H_kv, D), of one dtype and device.

    With `fp8` they may be e4m3, and then v may be contiguous along its keys instead of its head_dim.
    """
    quantized = fp8 and q.dtype == E4M3
    if not quantized:
        check_float("q", q)
    check_shape("q", q, None, None, None, None)
    B, _, H, D = q.shape
    check_shape("k", k, B, None, None, D)
    check_shape("v", v, B, k.shape[1], k.shape[2], D)
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(name, tensor, q.dtype)
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")
    for name, tensor in (("q", q), ("k", k)):
        check_last_dim_contiguous(name, tensor)
    if not (quantized and keys_contiguous(v)):
        check_last_dim_contiguous("v", v)
    if k.shape[2] == 0 or H % k.shape[2]:
        raise ValueError(f"k: expected a number of heads that divides q's {H}, got {k.shape[2]}")


def keys_contiguous(v: torch.Tensor) -> bool:
    """Whether v (B, S, H_kv, D) is contiguous along its keys, as a view of (B, H_kv, D, S) is."""
    return v.stride(1) == 1 and v.stride(3) != 1


def check_scales(
    q: torch.Tensor,
    k: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Raises `ValueError` unless scales are None, or fp32 with e4m3: q_scale (B, H), k_scale and v_scale (B, H_kv)."""
    for name, scale, heads in (("q_scale", q_scale, q), ("k_scale", k_scale, k), ("v_scale", v_scale, k)):
        if scale is None:
            continue
        if q.dtype != E4M3:
            raise ValueError(f"{name}: expected None, as q, k and v are {q.dtype} and not {E4M3}, got a tensor")
        check_shape(name, scale, q.shape[0], heads.shape[2])
        check_dtype(name, scale, torch.float32)
        if scale.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {scale.device}")

"""Guards and sizes that every flash_attention launcher shares."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_dtype, check_float, check_last_dim_contiguous, check_shape


def check_args(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises `ValueError` on tensors that are not q (B, T, H, D) and k, v (B, S, H_kv, D) of one dtype and device."""
    check_float("q", q)
    check_shape("q", q, None, None, None, None)
    B, _, H, D = q.shape
    check_shape("k", k, B, None, None, D)
    check_shape("v", v, B, k.shape[1], k.shape[2], D)
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(name, tensor, q.dtype)
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_last_dim_contiguous(name, tensor)
    if k.shape[2] == 0 or H % k.shape[2]:
        raise ValueError(f"k: expected a number of heads that divides q's {H}, got {k.shape[2]}")

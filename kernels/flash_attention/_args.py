"""Checks of the arguments of all flash_attention kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.reference.flash_attention import E4M3, check_operands


def check_args(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, fp8: bool = False) -> None:
    """Raises `ValueError` unless q is (B, T, H, D) and k, v (B, S, H_kv, D), of one dtype and device.

    With `fp8` they may be e4m3, and then v may be contiguous along its keys instead of its head_dim.
    """
    quantized = fp8 and q.dtype == E4M3
    if not quantized:
        check_float("q", q)
    check_operands(q, k, v)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")
    for name, tensor in (("q", q), ("k", k)):
        check_last_dim_contiguous(name, tensor)
    if not (quantized and keys_contiguous(v)):
        check_last_dim_contiguous("v", v)


def keys_contiguous(v: torch.Tensor) -> bool:
    """Whether v (B, S, H_kv, D) is contiguous along its keys, as a view of (B, H_kv, D, S) is."""
    return v.stride(1) == 1 and v.stride(3) != 1

"""Checks of the operands of all gemm_w4a16 kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.reference.rules import check_dtype, check_shape

GROUPS = (128, 64, 32)
"""Values along K that may share a scale."""
SYMMETRIC_ZERO = 8
"""The code of zero without zero points."""


def group_of(K: int, groups: int) -> int:
    """The group size with which K has `groups` groups, the last one perhaps short; 128 if one group holds all of K.

    From two groups on only one size fits.  Raises `ValueError` naming `scale` if no size fits.
    """
    for group in GROUPS:
        if -(-K // group) == groups:
            return group
    raise ValueError(f"scale: expected one for each 32, 64 or 128 of K={K}, got {groups} in a row")


def check_operands(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[int, int, int, int]:
    """M, N, K and the group.

    Raises `ValueError` unless a is (M, K) bf16, K even; b (N, K/2) uint8; scale (N, ceil(K / group)) of a float dtype;
    zero uint8 of that shape; bias (N,) bf16.
    """
    N = b.shape[0]
    M, K, group = check_all_but_b(a, N, scale, zero, bias)
    check_shape("b", b, None, K // 2)
    check_dtype("b", b, torch.uint8)
    return M, N, K, group


def check_all_but_b(
    a: torch.Tensor, N: int, scale: torch.Tensor, zero: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[int, int, int]:
    """M, K and the group.  Raises as `check_operands` does."""
    check_shape("a", a, None, None)
    M, K = a.shape
    check_dtype("a", a, torch.bfloat16)
    if K % 2:
        raise ValueError(f"a: expected an even K, for two codes a byte, got {K}")
    check_shape("scale", scale, N, None)
    check_float("scale", scale)
    group = group_of(K, scale.shape[1])
    if zero is not None:
        check_shape("zero", zero, *scale.shape)
        check_dtype("zero", zero, torch.uint8)
    if bias is not None:
        check_shape("bias", bias, N)
        check_dtype("bias", bias, torch.bfloat16)
        check_last_dim_contiguous("bias", bias)
    return M, K, group


def rows_along_k(a: torch.Tensor) -> str | None:
    """Why the kernel refuses an `a` that is not contiguous along K, or None."""
    if a.shape[1] > 1 and a.stride(1) != 1:
        return f"a: expected stride 1 along K, got strides {a.stride()}; gemm_w4a16/naive takes any"
    return None

"""More checks for the kernels for few rows: which dimension is contiguous, and how wide a load can be."""

from __future__ import annotations

import torch

from rooflab.kernels._tma import address_of

VECTOR_BYTES = 16
"""The widest load of a thread, and the least that cp.async (cg) and TMA copy."""


def k_is_contiguous(operand: torch.Tensor, k_dim: int) -> bool:
    """Whether the operand is contiguous along K: a as (M, K), b as a transposed (N, K) weight."""
    return operand.shape[k_dim] <= 1 or operand.stride(k_dim) == 1


def weight_stride(operand: torch.Tensor, row_dim: int) -> int:
    """Elements from row to row; 0 for a single row, whose stride has no meaning."""
    return operand.stride(row_dim) if operand.shape[row_dim] > 1 else 0


def alignment_bytes(a: torch.Tensor, b: torch.Tensor, whole_k: bool) -> int:
    """The largest power of two, at most 16, that divides the address of every row of a and of b.mT.

    With `whole_k` it also divides the bytes of K, so a row is a whole number of loads.  For K = 0 it is 16, because
    nothing is read.
    """
    K = a.shape[1]
    if not K:
        return VECTOR_BYTES
    bits = VECTOR_BYTES
    for operand, row_dim in ((a, 0), (b, 1)):
        size = operand.element_size()
        bits |= weight_stride(operand, row_dim) * size | address_of(operand)
        bits |= K * size if whole_k else 0
    return bits & -bits


def not_transposed(a: torch.Tensor, b: torch.Tensor, instead: str) -> str | None:
    """Why a kernel refuses operands that are not contiguous along K, or None; `instead` is a kernel for them."""
    if not k_is_contiguous(a, 1):
        return f"a: expected stride 1 along K, got strides {a.stride()}; gemm/{instead} takes any"
    if not k_is_contiguous(b, 0):
        return f"b: expected a transposed (N, K) weight, got strides {b.stride()}; gemm/{instead} takes any"
    return None

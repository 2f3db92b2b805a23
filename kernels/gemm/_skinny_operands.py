"""What the rungs for few rows ask of their operands beside `_operands.py`: how they lie, how wide they can be read."""

from __future__ import annotations

import torch

from rooflab.kernels._tma import address_of
from rooflab.kernels.tuning import BF16
from rooflab.reference.spec import Scheme

VECTOR_BYTES = 16
"""The widest load of a thread, and what cp.async and TMA copy at least."""


def k_is_contiguous(operand: torch.Tensor, k_dim: int) -> bool:
    """Whether neighbours along K are neighbours in memory: a in `NT`, and b as a transposed (N, K) weight."""
    return operand.shape[k_dim] <= 1 or operand.stride(k_dim) == 1


def row_stride(operand: torch.Tensor, row_dim: int) -> int:
    """Elements between rows; 0 where there is one row, whose stride says nothing."""
    return operand.stride(row_dim) if operand.shape[row_dim] > 1 else 0


def alignment_bytes(a: torch.Tensor, b: torch.Tensor, whole_k: bool) -> int:
    """The largest power of two, 16 at most, that divides the address of every row of a and of b.mT.

    With `whole_k` it divides the bytes of K as well, so that a row is a whole number of loads.  Without K nothing is
    read, and empty tensors have strides of their own.
    """
    K = a.shape[1]
    if not K:
        return VECTOR_BYTES
    bits = VECTOR_BYTES
    for operand, row_dim in ((a, 0), (b, 1)):
        size = operand.element_size()
        bits |= row_stride(operand, row_dim) * size | address_of(operand)
        bits |= K * size if whole_k else 0
    return bits & -bits


def not_transposed(a: torch.Tensor, b: torch.Tensor, instead: str) -> str | None:
    """Why operands whose rows do not run along K are refused; `instead` is a rung that takes them."""
    if not k_is_contiguous(a, 1):
        return f"a must have stride 1 along K, got strides {a.stride()}; gemm/{instead} takes any"
    if not k_is_contiguous(b, 0):
        return f"b must be a transposed (N, K) weight, got strides {b.stride()}; gemm/{instead} takes any"
    return None


def element_bytes(scheme: Scheme = BF16) -> int:
    """Bytes of an operand's element."""
    return scheme.activation.itemsize

"""How the TMA kernels of gemm_grouped describe their operands in memory, and which they refuse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import ALIGNMENT, STRIDE_LIMIT
from rooflab.kernels.gemm._tma import Stored, stored_as
from rooflab.reference.spec import Arguments


@dataclass(frozen=True)
class StoredExperts:
    """The experts' matrices as (E, N, K) in memory, K contiguous."""

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    """Elements from expert to expert, from column to column of b, and from k to k."""


def stored_experts(b: torch.Tensor) -> StoredExperts | None:
    """b, (E, K, N), for a tensor map of three dimensions, or None."""
    E, K, N = b.shape
    size = b.element_size()
    row = b.stride(2) if N > 1 else cdiv(K * size, ALIGNMENT) * ALIGNMENT // size
    matrix = b.stride(0) if E > 1 else N * row  # the stride of a single expert has no meaning
    address = b.storage_offset() * size if b.device.type == "meta" else b.data_ptr()
    aligned = address % ALIGNMENT == row * size % ALIGNMENT == matrix * size % ALIGNMENT == 0
    neighbours = K == 1 or b.stride(1) == 1
    if neighbours and aligned and K <= row and 0 < matrix and max(row, matrix) * size < STRIDE_LIMIT:
        return StoredExperts((E, N, K), (matrix, row, 1))
    return None


def why_no_maps(inputs: Arguments) -> str | None:
    """Why TMA cannot load these operands, or None."""
    a, b = inputs.a, inputs.b
    if not a.numel() or not b.numel():
        return None
    for name, matrix, as_stored in (("a", a, stored_as(a, False)), ("b", b, stored_experts(b))):
        if as_stored is None:
            strides = ", ".join(str(stride * matrix.element_size()) for stride in matrix.stride())
            return (
                f"{name}: expected stride 1 along K, and an address and other strides of whole {ALIGNMENT} bytes, for "
                f"TMA, got strides of {strides} bytes; gemm_grouped/grouped takes any"
            )
    return None


def stored(a: torch.Tensor, b: torch.Tensor) -> tuple[Stored, StoredExperts]:
    """Both operands for tensor maps, after `why_no_maps` gave no reason."""
    both = stored_as(a, False), stored_experts(b)
    assert both[0] is not None and both[1] is not None, "refused before"
    return both[0], both[1]

"""Implements the kernel `native` in C++ for the CPU.  It improves on the kernel `packed`.

At load, the weight is packed in panels of 32 columns.  The kernel reads each panel once, in order.  The layout is as in
BLIS (Van Zee and van de Geijn, 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.gemm._operands import along_k, traffic
from rooflab.kernels.launcher import kernel
from rooflab.reference.contract import Packed
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import Arguments, nbytes

SOURCE = Path(__file__).with_suffix(".cpp")
PANEL = 32


@dataclass(frozen=True)
class Panels(Packed):
    """A weight `[K, N]` in panels of 32 columns: floating-point values, or int8 codes with a scale for each column.
    `tensor` has the shape `[ceil(N / 32), K, 32]`.  Zeros follow the last column.
    """

    scales: Tensor | None = None
    """The fp32 scales (N,) of int8 codes, or None for other weights."""

    @property
    def nbytes(self) -> int:
        """Returns the size of the packed weight in bytes, with padding."""
        return self.tensor.nbytes + nbytes(self.scales)


def pack(b: torch.Tensor) -> Panels:
    """Packs `b` `[K, N]` in panels of 32 columns.  Raises `ValueError` if `b` does not have two dimensions."""
    check_shape("b", b, None, None)
    K, N = b.shape
    panel_count = -(-N // PANEL)
    panels = torch.zeros(panel_count * PANEL, K, dtype=b.dtype, device=b.device)
    panels[:N] = b.mT
    return Panels(panels.view(panel_count, PANEL, K).mT.contiguous(), (K, N), b.dtype)


def shape(of: Arguments) -> Any:
    """Returns the sizes, strides and number of threads, as the array that the C++ function takes."""
    (M, N), K = of.c.shape, of.a.shape[1]
    return sizes(M, N, K, of.a.stride(0), of.c.stride(0), torch.get_num_threads())


def product(a: Tensor, b: Panels, bias: Tensor | None, c: Tensor, bound: Any) -> None:
    """Computes `(a @ b) * scales + bias`.  The weight is int8 with scales, or has the dtype of `a` and no scales."""
    data_pointers = (None if tensor is None else tensor.data_ptr() for tensor in (a, b.tensor, b.scales, bias, c))
    built(SOURCE, "ipppppp")(DTYPE_CODES[a.dtype], *data_pointers, bound)


@kernel(backend="cpp", devices=("cpu",), prepare=pack, packed=Panels, bind=shape, traffic=traffic, holds=along_k("a"))
def native(a: Tensor, b: Panels, bias: Tensor | None, c: Tensor, *, bound: Any) -> None:
    """Computes `a @ b + bias` in fp32, rounded once.  `b` is a result of `pack`."""
    product(a, b, bias, c, bound)

"""Over packed, in C++: panels of 32 columns that every product reads once, in order; one row streams them.

As in BLIS (Van Zee and van de Geijn, 2015), but the weight is packed once, at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rooflab.kernels._checks import check_contiguous, check_float, check_last_dim_contiguous, output
from rooflab.kernels._native import DTYPES, Layouts, built, sizes
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

SOURCE = Path(__file__).with_suffix(".cpp")
PANEL = 32
_layouts = Layouts()


@dataclass(frozen=True)
class Panels:
    """A (K, N) weight in panels of 32 columns, or codes with a scale for each column."""

    tensor: torch.Tensor
    """(N / 32 rounded up, K, 32), zeros behind the last column."""
    K: int
    N: int
    scales: torch.Tensor | None = None
    """(N,) fp32 of int8 codes."""

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N), the shape of the original weight."""
        return self.K, self.N

    @property
    def nbytes(self) -> int:
        """Bytes, padding included."""
        return self.tensor.nbytes + nbytes(self.scales)


def pack(b: torch.Tensor) -> Panels:
    """`b` in panels.  b: (K, N); raises `ValueError` on another shape."""
    check_shape("b", b, None, None)
    K, N = b.shape
    count = -(-N // PANEL)
    panels = torch.zeros(count * PANEL, K, dtype=b.dtype, device=b.device)
    panels[:N] = b.mT
    return Panels(panels.view(count, PANEL, K).mT.contiguous(), K, N)


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once; the weight was packed at load."""
    a, b = inputs.a, inputs.b
    return Traffic(nbytes(a, inputs.bias) + b.nbytes, a.shape[0] * b.shape[1] * a.element_size())


def product(a: torch.Tensor, b: Panels, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    """a b * scales + bias; the weight has a's dtype, or int8 with scales.

    Raises `ValueError` on a weight that is not packed, or on wrong shapes or dtypes.
    """
    if not isinstance(b, Panels):
        raise ValueError(f"b: expected a weight packed by this kernel's prepare, got {type(b).__name__}")
    out = torch.empty((a.shape[0], b.N), dtype=a.dtype) if out is None else out
    shape = _layouts.of(_shape, (a, b.tensor, b.scales, bias, out), b.N)
    pointers = (None if x is None else x.data_ptr() for x in (a, b.tensor, b.scales, bias, out))
    built(SOURCE, "ipppppp")(DTYPES[a.dtype], *pointers, shape)
    return out


def _shape(
    a: torch.Tensor,
    panels: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    N: int,
) -> Any:
    K = panels.shape[1]
    check_shape("a", a, None, K)
    check_float("a", a)
    check_last_dim_contiguous("a", a)
    check_dtype("b", panels, a.dtype if scales is None else torch.int8)
    if bias is not None:
        check_shape("bias", bias, N)
        check_dtype("bias", bias, a.dtype)
        check_contiguous("bias", bias)
    output(out, (len(a), N), a)
    return sizes(len(a), N, K, a.stride(0), out.stride(0), torch.get_num_threads())


def unsupported(inputs: Arguments) -> str | None:
    """Why these operands are not taken, or None."""
    stride = inputs.a.stride(1)
    return (
        None if stride == 1 or inputs.a.shape[1] == 1 else f"reads rows of a, got stride {stride} between its columns"
    )


@register(
    op="gemm", name="native", role="optimized", backend="cpp", devices=("cpu",), prepare=pack, unsupported=unsupported,
    traffic=traffic,
)  # fmt: skip
def gemm(a: torch.Tensor, b: Panels, bias: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """a b + bias with a weight from `pack`, in fp32, rounded once.

    a: (M, K); b: packed from (K, N); bias: (N,); returns (M, N).  Raises `ValueError` on a weight that is not packed,
    or on wrong shapes or dtypes.
    """
    return product(a, b, bias, out)

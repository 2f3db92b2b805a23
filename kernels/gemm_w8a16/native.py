"""Over packed, in C++: panels of codes that become fp32 as they are loaded; a column's scale multiplies its fp32 sum.

With one row only the codes' bytes count.  No weight is rounded.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rooflab.kernels._native import Layouts
from rooflab.kernels.gemm import native
from rooflab.kernels.gemm.native import Panels
from rooflab.kernels.gemm_w8a16._operands import check_all_but_b
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.rules import check_dtype
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

_layouts = Layouts()


def pack(b: torch.Tensor, scale: torch.Tensor) -> Panels:
    """Codes (K, N) int8 in panels, with their scales (N,) in fp32.  Raises `ValueError` on another dtype or shape."""
    check_dtype("b", b, torch.int8)
    return replace(native.pack(b), scales=scale.float().contiguous())


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once; the weight was packed at load."""
    a, (K, N) = inputs.a, inputs.b.shape
    return Traffic(nbytes(a, inputs.scale, inputs.bias) + K * N, len(a) * N * a.element_size())


def unsupported(inputs: Arguments) -> str | None:
    """Why these operands are not taken, or None."""
    return native.unsupported(inputs)


@register(
    op="gemm_w8a16", name="native", role="optimized", backend="cpp", devices=("cpu",), prepare=pack, traffic=traffic,
    unsupported=unsupported,
)  # fmt: skip
def gemm_w8a16(
    a: torch.Tensor, b: Panels, scale: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a (scale b) + bias in fp32, rounded once.

    a: (M, K) bf16; b: from `pack`, with the scales in it; scale: (N,); bias: (N,) bf16; returns (M, N).  Raises
    `ValueError` on a weight that is not packed, or on wrong shapes or dtypes.
    """
    if not isinstance(b, Panels) or b.scales is None:
        raise ValueError(f"b: expected a weight packed by this kernel's prepare, got {type(b).__name__}")
    _layouts.of(check_all_but_b, (a, scale, bias), b.N)
    return native.product(a, b, bias, out)

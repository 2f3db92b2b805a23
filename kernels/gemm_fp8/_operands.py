"""What the kernels of gemm_fp8 ask of their operands beyond the op, and the traffic of those that read each once."""

from __future__ import annotations

import torch

from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

TMA_ALIGNMENT = 16
"""A tensor map's addresses and strides are multiples of this many bytes."""


def block_scaled(a_scale: torch.Tensor) -> bool:
    """Whether the scales are block scales; otherwise each operand has one scale."""
    return a_scale.ndim == 2


def why_no_tma(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why TMA and wgmma cannot read the operands, or None."""
    for name, tensor, matrix in (("a", a, a), ("b", b, b.mT)):
        if matrix.stride(1) != 1:
            return f"{name}: expected K-major storage for fp8 wgmma, got strides {tensor.stride()}; naive takes any"
        if matrix.stride(0) % TMA_ALIGNMENT:
            return (
                f"{name}: expected a multiple of {TMA_ALIGNMENT} bytes between rows of K for TMA, "
                f"got {matrix.stride(0)}; naive takes any"
            )
        if matrix.shape[0] > 1 and matrix.stride(0) < matrix.shape[1]:
            return f"{name}: expected rows of K that do not overlap, got strides {tensor.stride()}; naive takes any"
        if not matrix.is_meta and matrix.data_ptr() % TMA_ALIGNMENT:
            return f"{name}: expected an address of a multiple of {TMA_ALIGNMENT} for TMA; naive takes any"
    return None


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once; the best tile order comes close to this."""
    a, b = inputs.a, inputs.b
    return Traffic(
        read_bytes=nbytes(a, b, inputs.a_scale, inputs.b_scale, inputs.bias), write_bytes=2 * a.shape[0] * b.shape[1]
    )

"""Checks of the operands of all gemm_fp8 kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_dtype, check_last_dim_contiguous, check_shape
from rooflab.kernels.registry import Arguments
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

E4M3 = torch.float8_e4m3fn
GROUP = 128
"""Values along K, and along N of b, that share a block scale."""
TMA_ALIGNMENT = 16
"""A tensor map's addresses and strides are multiples of this many bytes."""


def check_operands(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[int, int, int]:
    """M, N and K.

    Raises `ValueError` unless a is (M, K) and b (K, N), e4m3, bias (N,) bf16, and the scales fp32: one element each,
    or (M, ceil(K / 128)) and (ceil(K / 128), ceil(N / 128)).
    """
    check_shape("a", a, None, None)
    M, K = a.shape
    check_shape("b", b, K, None)
    N = b.shape[1]
    for name, tensor in (("a", a), ("b", b)):
        check_dtype(name, tensor, E4M3)
    for name, tensor in (("a_scale", a_scale), ("b_scale", b_scale)):
        check_dtype(name, tensor, torch.float32)
    if block_scaled(a_scale):
        groups = -(-K // GROUP)
        check_shape("a_scale", a_scale, M, groups)
        check_shape("b_scale", b_scale, groups, -(-N // GROUP))
    else:
        for name, tensor in (("a_scale", a_scale), ("b_scale", b_scale)):
            if tensor.ndim > 1 or tensor.numel() != 1:
                raise ValueError(f"{name}: expected one element, shape () or (1,), got {tuple(tensor.shape)}")
    if bias is not None:
        check_shape("bias", bias, N)
        check_dtype("bias", bias, torch.bfloat16)
        check_last_dim_contiguous("bias", bias)
    return M, N, K


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

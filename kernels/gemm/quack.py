"""QuACK's GEMM for Hopper, in CuTe DSL (https://github.com/Dao-AILab/quack, `quack-kernels`), if it is installed.

Its `gemm` tunes itself: the first call of each shape and dtype compiles and times 44 configs on Hopper (0.6.4).  Its
users get that config too; a time measured after a warm-up does not contain the tuning.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._tma import ALIGNMENT, address_of
from rooflab.kernels.gemm._operands import check_operands, traffic
from rooflab.kernels.gemm._tma import epilogue_alone
from rooflab.kernels.registry import register


def why_not_taken(a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None) -> str | None:
    """Why QuACK cannot take the operands: on Hopper 0.6.4 takes 16 bits, and rows a multiple of 16 bytes apart."""
    if a.dtype == torch.float32:
        return "a: expected torch.float16 or torch.bfloat16, got torch.float32; gemm/pipelined takes it"
    if a.ndim != 2 or b.ndim != 2 or not a.numel() or not b.numel():
        return None
    if b.shape[1] * b.element_size() % ALIGNMENT:
        return f"b: expected N of whole {ALIGNMENT} bytes, got {b.shape[1]} columns; gemm/pipelined takes any"
    reason = _why_not("a", a, (1, 0)) or _why_not("b", b, (1, 0))
    return reason or (_why_not("residual", residual, (1,)) if residual is not None else None)


def _why_not(name: str, matrix: torch.Tensor, inner_dims: tuple[int, ...]) -> str | None:
    """Why QuACK cannot take a matrix, or None; one of `inner_dims` must be contiguous."""
    address = address_of(matrix) % ALIGNMENT
    for dim in inner_dims:
        if matrix.stride(dim) == 1 and matrix.stride(1 - dim) * matrix.element_size() % ALIGNMENT == 0 == address:
            return None
    return (
        f"{name}: expected an address and row stride of whole {ALIGNMENT} bytes and stride 1 along rows, got address % "
        f"{ALIGNMENT} = {address} and strides {matrix.stride()}; gemm/pipelined takes any"
    )


@register(
    op="gemm", name="quack", role="peer", backend="cuda", min_sm=90, devices=("cuda",), requires=("quack",),
    traffic=traffic, unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b, inputs.residual),
)  # fmt: skip
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """a b + bias + residual with `quack.gemm_interface.gemm`, or `gemm_add` with a residual.

    a: (M, K); b: (K, N); fp16 or bf16, one dimension of each contiguous; bias: (N,); residual: (M, N); addresses and
    row strides are whole 16 bytes; returns (M, N).  Bias together with residual needs 0.6.2.  Raises `ValueError` on
    wrong shapes, dtypes or strides.
    """
    M, N, K = check_operands(a, b, bias, residual)
    reason = why_not_taken(a, b, residual)
    out = output(out, (M, N), a)
    if reason is None and out.numel() and K:
        reason = _why_not("out", out, (1,))
    if reason:
        raise ValueError(reason)
    if not out.numel() or not K:
        return epilogue_alone(out, bias, residual)
    library: Any = import_module("quack.gemm_interface")
    added = {} if bias is None else {"bias": bias}
    if residual is None:
        library.gemm(a, b, out=out, **added)
    else:
        library.gemm_add(a, b, residual, out=out, **added)
    return out

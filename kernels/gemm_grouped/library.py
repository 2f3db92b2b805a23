"""torch's grouped product, `torch._grouped_mm`: one CUTLASS launch on Hopper in bf16, else a loop on the host."""

from __future__ import annotations

import torch

from rooflab.kernels._torch_cpu import check_rows, padded_rows_refused
from rooflab.kernels.gemm_grouped._operands import check_operands, group_rows
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

ALIGNMENT = 16
"""Addresses and strides must be multiples of this many bytes (messages of torch 2.11 and 2.13)."""


def traffic(inputs: Arguments) -> Traffic:
    """a is read once, and once the matrix of each expert with rows; the best tile order comes close to this."""
    a, b, offsets = inputs.a, inputs.b, inputs.offsets
    _, K, N = b.shape
    used = len(list(group_rows(offsets)))
    return Traffic(
        read_bytes=nbytes(a, offsets) + used * K * N * b.element_size(), write_bytes=a.shape[0] * N * a.element_size()
    )


def unsupported(inputs: Arguments) -> str | None:
    """Why torch refuses the operands, or would not use its grouped kernel, or None."""
    a, b = inputs.a, inputs.b
    if a.device.type == "cuda" and a.dtype != torch.bfloat16:
        return f"torch's grouped kernel for CUDA takes bf16, got {a.dtype}, for which it would loop on the host"
    if a.ndim != 2 or b.ndim != 3 or not a.numel() or not b.numel():
        return None
    for name, matrix in (("a", a), ("b", b)):
        size = matrix.element_size()
        rows, columns = matrix.stride()[-2:]
        # torch does not check the distance between experts, but its kernel's TMA needs it aligned too.
        apart = matrix.stride(0) * size if matrix.ndim == 3 and matrix.shape[0] > 1 else 0
        wide = max(rows, columns) * size
        address = 0 if matrix.device.type == "meta" else matrix.data_ptr()
        if 1 not in (rows, columns) or wide % ALIGNMENT or apart % ALIGNMENT or address % ALIGNMENT:
            return (
                f"{name}: torch wants stride 1 in one dimension and addresses and strides of whole {ALIGNMENT} bytes, "
                f"got strides {tuple(matrix.stride())} of {size} bytes"
            )
    return padded_rows_refused(inputs)


@register(op="gemm_grouped", name="library", role="library", backend="torch", traffic=traffic, unsupported=unsupported)
def gemm_grouped(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its matrix with `torch._grouped_mm`, which takes the ends of the groups.

    a: (T, K), rows sorted by expert; b: (E, K, N); offsets: (E + 1,) int32; returns (T, N), with rows that torch may
    pad.  Raises `ValueError` on a wrong shape or dtype.
    """
    T, _, N, K = check_operands(a, b, offsets)
    if not T or not N or not K:
        return a.new_zeros((T, N))
    check_rows(a)
    return torch._grouped_mm(a, b, offs=offsets[1:])

"""The kernel `library`: `torch._grouped_mm`, one CUTLASS launch on Hopper in bf16, else a loop on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.gemm_grouped._operands import group_rows
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

ALIGNMENT = 16
"""Addresses and strides must be multiples of this many bytes (messages of torch 2.11 and 2.13)."""


def traffic(inputs: Arguments) -> Traffic:
    """Counts `a` once, and once the matrix of each expert with rows.  The best tile order comes close to this."""
    a, b, offsets = inputs.a, inputs.b, inputs.offsets
    _, K, N = b.shape
    used = len(list(group_rows(offsets)))
    return Traffic(
        read_bytes=nbytes(a, offsets) + used * K * N * b.element_size(), write_bytes=a.shape[0] * N * a.element_size()
    )


def unsupported(inputs: Arguments) -> str | None:
    """Returns why torch refuses the operands or would not use its grouped kernel, or None."""
    a, b = inputs.a, inputs.b
    if a.device.type == "cuda" and a.dtype != torch.bfloat16:
        return f"a: expected bf16, because torch would loop on the host for others on CUDA, got {a.dtype}"
    if not a.numel() or not b.numel():
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


@kernel(backend="torch", traffic=traffic, unsupported=unsupported, aligned=("a", "b"))
def library(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Calls `torch._grouped_mm`, which takes the groups' ends and no `out`.  The result's rows may be padded."""
    T, N = a.shape[0], b.shape[2]
    return torch._grouped_mm(a, b, offs=offsets[1:]) if T and N and a.shape[1] else a.new_zeros((T, N))

"""Implements `library`: `torch._grouped_mm`, a single CUTLASS launch on Hopper in bf16, else a loop on the host."""

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
    """Counts the bytes of `a` once.  Counts each expert's matrix once if the expert has rows."""
    a, b, offsets = inputs.a, inputs.b, inputs.offsets
    _, K, N = b.shape
    expert_count = len(list(group_rows(offsets)))
    return Traffic(
        read_bytes=nbytes(a, offsets) + expert_count * K * N * b.element_size(),
        write_bytes=a.shape[0] * N * a.element_size(),
    )


def unsupported(inputs: Arguments) -> str | None:
    """Returns why torch refuses the operands, or why torch would loop over the experts.  Otherwise returns None."""
    a, b = inputs.a, inputs.b
    if a.device.type == "cuda" and a.dtype != torch.bfloat16:
        return f"a: expected bf16, because torch would loop on the host for others on CUDA, got {a.dtype}"
    if not a.numel() or not b.numel():
        return None
    for name, matrix in (("a", a), ("b", b)):
        item_bytes = matrix.element_size()
        rows, columns = matrix.stride()[-2:]
        # torch does not check the distance between experts, but its kernel's TMA needs it aligned too.
        expert_pitch = matrix.stride(0) * item_bytes if matrix.ndim == 3 and matrix.shape[0] > 1 else 0
        stride_bytes = max(rows, columns) * item_bytes
        data_address = 0 if matrix.device.type == "meta" else matrix.data_ptr()
        if 1 not in (rows, columns) or stride_bytes % ALIGNMENT or expert_pitch % ALIGNMENT or data_address % ALIGNMENT:
            return (
                f"{name}: torch wants stride 1 in one dimension and addresses and strides of whole {ALIGNMENT} bytes, "
                f"got strides {tuple(matrix.stride())} of {item_bytes} bytes"
            )
    return padded_rows_refused(inputs)


@kernel(backend="torch", traffic=traffic, unsupported=unsupported, aligned=("a", "b"))
def library(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Calls `torch._grouped_mm`, which has no argument `out`.  The rows of its result may have padding between them."""
    T, N = a.shape[0], b.shape[2]
    return torch._grouped_mm(a, b, offs=offsets[1:]) if T and N and a.shape[1] else a.new_zeros((T, N))

"""A loop over the experts: the host reads the offsets and calls one product per expert with rows."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._torch_cpu import check_rows, padded_rows_refused
from rooflab.kernels.gemm_grouped._operands import check_operands, group_rows
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """a is read once, and once the matrix of each expert with rows; one launch per such expert."""
    a, b, offsets = inputs.a, inputs.b, inputs.offsets
    _, K, N = b.shape
    used = len(list(group_rows(offsets)))
    return Traffic(
        read_bytes=nbytes(a, offsets) + used * K * N * b.element_size(),
        write_bytes=a.shape[0] * N * a.element_size(),
        launches=max(1, used),
    )


@register(
    op="gemm_grouped", name="naive", role="naive", backend="torch", traffic=traffic,
    unsupported=padded_rows_refused,
)  # fmt: skip
def gemm_grouped(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Each expert's rows times its matrix with `torch.mm`, expert by expert.

    a: (T, K), rows sorted by expert; b: (E, K, N); offsets: (E + 1,) int32; returns (T, N).  Raises `ValueError` on a
    wrong shape or dtype.
    """
    T, _, N, _ = check_operands(a, b, offsets)
    check_rows(a)
    out = output(out, (T, N), a)
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if end > start:
            out[start:end] = torch.mm(a[start:end], b[expert])
    return out

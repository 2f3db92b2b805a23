"""A loop over the experts: the host reads the offsets and calls one product per expert with rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.gemm_grouped._operands import group_rows
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
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


@kernel(backend="torch", traffic=traffic, unsupported=padded_rows_refused)
def naive(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor) -> None:
    """Each expert's rows times its matrix with `torch.mm`, expert by expert."""
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if end > start:
            out[start:end] = torch.mm(a[start:end], b[expert])

"""torch's matmul: cuBLAS on CUDA, oneDNN or MKL on the CPU."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._torch_cpu import check_rows, padded_rows_refused
from rooflab.kernels.gemm._operands import check_operands, traffic
from rooflab.kernels.registry import Arguments, register


def unsupported(inputs: Arguments) -> str | None:
    """torch adds one addend per call and rounds between calls; on some CPUs it reads the padding of a."""
    if inputs.bias is not None and inputs.residual is not None:
        return "torch has no call that adds both a bias and a residual before it rounds"
    if inputs.precision == "tf32" and inputs.a.device.type == "cpu":
        return "torch has no TF32 on a CPU"
    return padded_rows_refused(inputs)


@register(op="gemm", name="library", role="library", backend="torch", traffic=traffic, unsupported=unsupported)
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    precision: str = "ieee",
) -> torch.Tensor:
    """a b + bias or + residual with `torch.mm` or `torch.addmm`.

    a: (M, K); b: (K, N); bias: (N,) or residual: (M, N); any strides; returns (M, N).  `precision="tf32"` allows TF32
    for this call alone.  Raises `ValueError` on wrong shapes or dtypes.
    """
    M, N, _ = check_operands(a, b, bias, residual, precision)
    if out is not None:
        output(out, (M, N), a)
    check_rows(a)
    addend = residual if bias is None else bias
    if precision == "ieee":
        return torch.mm(a, b, out=out) if addend is None else torch.addmm(addend, a, b, out=out)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return torch.mm(a, b, out=out) if addend is None else torch.addmm(addend, a, b, out=out)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

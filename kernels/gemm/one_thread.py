"""Next to naive, in CUDA C++: one output per thread, two loads per product, as in the first lesson of CUDA courses.

A warp's 32 outputs are neighbours in a row.  The warp reads one value of A and a row of B; if B is a transposed
weight, it reads one value from each of 32 rows: 32 sectors for 32 values.  Only caches keep values for reuse.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rooflab.kernels._checks import output
from rooflab.kernels._cuda import CudaKernel, load
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

ROWS, COLUMNS = 8, 32
"""Outputs of a CTA, as in the source."""
SOURCE = Path(__file__).with_suffix(".cu").read_text()
ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""CUDA's names of the dtypes."""


def _kernel(dtype: torch.dtype) -> CudaKernel:
    return load(SOURCE, "gemm_one_thread", options=(f"-DELEMENT={ELEMENTS[dtype]}",))


def traffic(inputs: Arguments) -> Traffic:
    """a is read once, b once per row of CTAs, without reuse from L2."""
    a, b = inputs.a, inputs.b
    M, N = a.shape[0], b.shape[1]
    return Traffic(
        read_bytes=nbytes(a, inputs.bias, inputs.residual) + cdiv(M, ROWS) * nbytes(b),
        write_bytes=M * N * a.element_size(),
    )


@register(op="gemm", name="one_thread", role="optimized", backend="cuda", requires=("cupy",), traffic=traffic)
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """a b + bias + residual in fp32 FMAs, in the order of k.

    a: (M, K); b: (K, N); fp32, fp16 or bf16, any strides; bias: (N,) contiguous; residual: (M, N), stride 1 along its
    rows; returns (M, N).  Raises `ValueError` on wrong shapes or dtypes.
    """
    M, N, K = check_operands(a, b, bias, residual)
    out = output(out, (M, N), a)
    if out.numel():
        strides = (*a.stride(), *b.stride(), 0 if residual is None else residual.stride(0), out.stride(0))
        grid = (cdiv(M, ROWS) * cdiv(N, COLUMNS),)
        sizes = (np.int32(M), np.int32(N), np.int32(K))
        _kernel(a.dtype)(grid, (COLUMNS, ROWS), a, b, bias, residual, out, *sizes, *map(np.int64, strides))
    return out

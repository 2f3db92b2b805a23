"""Over one_thread: tiles of A and B pass through shared memory, and a thread has 8 x 8 outputs in registers.

A CTA of 256 threads uses each value that it reads from memory 128 times; a thread uses each value that it reads from
shared memory eight times.  The next tile is loaded to registers during a product and written to the other of two
buffers, so a step of 8 k has one barrier.  Four elements move at once if strides and addresses allow.  Tiles are fp32,
in a layout without bank conflicts.  Products are fp32 FMAs: the meaning of `precision="ieee"` for fp32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rooflab.kernels._checks import output
from rooflab.kernels._cuda import CudaKernel, load
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import check_operands
from rooflab.kernels.gemm.one_thread import ELEMENTS
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

TILE, THREADS, GROUP = 128, 256, 4
"""Outputs of a CTA in each dimension, its threads, and the elements that move at once, as in the source."""
SOURCE = Path(__file__).with_suffix(".cu").read_text()


def _is_vector(matrix: torch.Tensor, contiguous: int) -> bool:
    """Whether four neighbours along dimension `contiguous` can move at once."""
    size = GROUP * matrix.element_size()
    aligned = matrix.data_ptr() % size == 0 and matrix.stride(1 - contiguous) % GROUP == 0
    return matrix.stride(contiguous) == 1 and aligned


def _kernel(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> CudaKernel:
    a_along_k, b_along_k = a.stride(1) == 1, b.stride(1) != 1
    flags = {
        "A_ALONG_K": a_along_k,
        "A_VECTOR": _is_vector(a, 1 if a_along_k else 0),
        "B_ALONG_K": b_along_k,
        "B_VECTOR": _is_vector(b, 0 if b_along_k else 1),
        "OUT_VECTOR": _is_vector(out, 1),
    }
    options = (f"-DELEMENT={ELEMENTS[a.dtype]}", *(f"-D{name}={int(value)}" for name, value in flags.items()))
    return load(SOURCE, "gemm_shared_tiles", options=options)


def traffic(inputs: Arguments) -> Traffic:
    """a is read once, b once per row of tiles, without reuse from L2."""
    a, b = inputs.a, inputs.b
    M, N = a.shape[0], b.shape[1]
    return Traffic(
        read_bytes=nbytes(a, inputs.bias, inputs.residual) + cdiv(M, TILE) * nbytes(b),
        write_bytes=M * N * a.element_size(),
    )


@register(op="gemm", name="shared_tiles", role="optimized", backend="cuda", requires=("cupy",), traffic=traffic)
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """a b + bias + residual in fp32 FMAs, from tiles in shared memory.

    a: (M, K); b: (K, N); fp32, fp16 or bf16, any strides; bias: (N,) contiguous; residual: (M, N), stride 1 along its
    rows; returns (M, N).  Raises `ValueError` on wrong shapes or dtypes.
    """
    M, N, K = check_operands(a, b, bias, residual)
    out = output(out, (M, N), a)
    if out.numel():
        strides = (*a.stride(), *b.stride(), 0 if residual is None else residual.stride(0), out.stride(0))
        grid = (cdiv(M, TILE) * cdiv(N, TILE),)
        sizes = (np.int32(M), np.int32(N), np.int32(K))
        _kernel(a, b, out)(grid, (THREADS,), a, b, bias, residual, out, *sizes, *map(np.int64, strides))
    return out

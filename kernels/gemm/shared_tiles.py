"""Implements `shared_tiles`, the version after `one_thread`: tiles in shared memory, 8 x 8 outputs per thread.

A CTA of 256 threads uses each value from global memory 128 times.  A thread uses each value from shared memory eight
times.  There are two buffers in shared memory.  While one tile is multiplied, the next tile is loaded to registers and
then written to the other buffer.  So a step of 8 values along K has one barrier.  Four elements move at once if strides
and addresses allow.  Tiles are fp32, in a layout without bank conflicts.  Products are fp32 FMAs, which is the meaning
of `precision="ieee"` for fp32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rooflab.kernels._cuda import load, macros
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import panels_traffic, row_stride
from rooflab.kernels.gemm.one_thread import ELEMENT_TYPES
from rooflab.kernels.launcher import kernel

TILE_SIZE, THREADS, GROUP = 128, 256, 4
"""A CTA's outputs in each dimension, its threads, and the number of elements that move at once, as in the source."""
SOURCE = Path(__file__).with_suffix(".cu").read_text()


def _is_vector(matrix: torch.Tensor, contiguous: int) -> bool:
    """Returns whether one load can read four neighbours of `matrix` along dimension `contiguous`."""
    vector_bytes = GROUP * matrix.element_size()
    is_aligned = matrix.data_ptr() % vector_bytes == 0 and matrix.stride(1 - contiguous) % GROUP == 0
    return matrix.stride(contiguous) == 1 and is_aligned


@kernel(
    backend="cuda",
    requires=("cupy",),
    traffic=lambda inputs: panels_traffic(inputs, TILE_SIZE),
    over="one_thread",
    shows={
        "in {bf16|fp32}": (
            "loop.barrier == 1 and loop.shared_store > 0 and not uses_tensor_cores and stack_bytes == 0; "
            "loop.fma == 16 * loop.shared_load and loop.fma >= 40 * loop.global_load"
        )
    },
)
def shared_tiles(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *, residual: Tensor | None) -> None:
    """Computes `a @ b + bias + residual` with fp32 FMAs from tiles in shared memory.  Operands may have any strides."""
    (M, K), N = a.shape, b.shape[1]
    strides = *a.stride(), *b.stride(), row_stride(residual), c.stride(0)
    scalar_args = *map(np.int32, (M, N, K)), *map(np.int64, strides)
    a_along_k, b_along_k = a.stride(1) == 1, b.stride(1) != 1
    compiler_options = macros(
        ELEMENT=ELEMENT_TYPES[a.dtype],
        A_ALONG_K=a_along_k,
        A_VECTOR=_is_vector(a, 1 if a_along_k else 0),
        B_ALONG_K=b_along_k,
        B_VECTOR=_is_vector(b, 0 if b_along_k else 1),
        OUT_VECTOR=_is_vector(c, 1),
    )
    compiled_kernel = load(SOURCE, "gemm_shared_tiles", options=compiler_options)
    compiled_kernel((cdiv(M, TILE_SIZE) * cdiv(N, TILE_SIZE),), (THREADS,), a, b, bias, residual, c, *scalar_args)

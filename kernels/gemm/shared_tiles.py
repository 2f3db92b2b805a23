"""Implements the kernel `shared_tiles`.  Shared memory holds tiles, and a thread computes 8 x 8 outputs.

The kernel improves on `one_thread`.  A CTA of 256 threads uses each value from global memory 128 times.  The next tile
is loaded while one tile is multiplied.  Products are fp32 FMAs, as `precision="ieee"` requires for fp32.
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

TILE_SIZE, THREADS, VEC_SIZE = 128, 256, 4
"""A CTA's outputs in each dimension, its threads, and the number of elements that move at once, as in the source."""
SOURCE = Path(__file__).with_suffix(".cu").read_text()


def _is_vector(matrix: torch.Tensor, contiguous: int) -> bool:
    """Returns True if one vector load can read four neighbours of `matrix`.  The neighbours lie along the dimension
    `contiguous`."""
    vector_bytes = VEC_SIZE * matrix.element_size()
    is_aligned = matrix.data_ptr() % vector_bytes == 0 and matrix.stride(1 - contiguous) % VEC_SIZE == 0
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

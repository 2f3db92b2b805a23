"""Implements the kernel `one_thread` in CUDA C++.  A thread computes one output, with two loads per multiplication.

A warp computes 32 neighbouring outputs of a row.  If B is a transposed weight, a load of 32 values of B reads 32
sectors.  Only caches reuse a value.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rooflab.kernels._cuda import load, macros
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import panels_traffic, row_stride
from rooflab.kernels.launcher import kernel

CTA_ROWS, COLUMNS = 8, 32
"""Rows and columns of a CTA's outputs, as in the CUDA source."""
SOURCE = Path(__file__).with_suffix(".cu").read_text()
ELEMENT_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The names of the dtypes in CUDA C++."""


@kernel(
    backend="cuda",
    requires=("cupy",),
    traffic=lambda inputs: panels_traffic(inputs, CTA_ROWS),
    over="naive",
    shows={
        "": (
            "loop.global_load == 2 * loop.fma > 0; "
            "loop.shared_load == loop.shared_store == loop.barrier == loop.wgmma == 0"
        )
    },
)
def one_thread(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *, residual: Tensor | None) -> None:
    """Computes `a @ b + bias + residual` with fp32 FMAs, in the order of k.  Operands may have any strides."""
    (M, K), N = a.shape, b.shape[1]
    strides = *a.stride(), *b.stride(), row_stride(residual), c.stride(0)
    scalar_args = *map(np.int32, (M, N, K)), *map(np.int64, strides)
    compiled_kernel = load(SOURCE, "gemm_one_thread", options=macros(ELEMENT=ELEMENT_TYPES[a.dtype]))
    compiled_kernel((cdiv(M, CTA_ROWS) * cdiv(N, COLUMNS),), (COLUMNS, CTA_ROWS), a, b, bias, residual, c, *scalar_args)

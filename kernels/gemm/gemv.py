"""Over naive, for one to four rows of a: reads the weight once, 16 bytes per thread at a time, and reduces in a warp.

With so few rows the product is a stream of weights, so there is no tile, no tensor core and no staging in shared
memory.  A warp takes `rows` rows of the weight and issues `rows * unroll` loads before it uses the first.  If that
leaves too few warps, K is split over the warps of a CTA, then over a cluster of CTAs; their partial sums meet in
distributed shared memory in a fixed order, without a second launch or a workspace.

At HBM's rate of an H100 (14.5 bytes a clock and SM) its loop takes 20% of the issue slots for one row of a and 43% for
four (230 and 487 instructions for 4 KB of the weight), so up to four rows cost what one costs.

Within `_pdl.pdl()` a warp asks for its first `rows * unroll` vectors, up to 17 MB on all SMs, before it waits for the
kernel before; `swap_ab` says what that can hide.  The loads are no `ld.global.nc`, which ptxas moves behind the wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._pdl import DEPENDENT, pdl_is_on
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import row_stride, traffic
from rooflab.kernels.gemm._skinny_configs import GEMV, MOST_ROWS, WARP, WARPS, GemvConfig
from rooflab.kernels.gemm._skinny_operands import ELEMENTS, alignment_bytes, not_transposed, weight_stride
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments

SOURCE = DEPENDENT + Path(__file__).with_suffix(".cu").read_text()


def divided(of: Arguments) -> Any:
    """Of a layout: options of the compiler, the grid, sizes and strides."""
    a, b, config = of.a, of.b, of.config
    sizes = {
        "ELEMENT": ELEMENTS[a.dtype],
        "BYTES": alignment_bytes(a, b, whole_k=True),
        "M": a.shape[0],
        "ROWS": config.rows,
        "UNROLL": config.unroll,
        "WARPS": WARPS,
        "WARPS_K": config.warps_k,
        "SPLIT": config.split,
    }
    K, N = b.shape
    strides = weight_stride(a, 0), weight_stride(b, 1), row_stride(of.residual), of.c.stride(0)
    grid = (cdiv(N, config.rows * (WARPS // config.warps_k)) * config.split,)
    options = tuple(f"-D{name}={value}" for name, value in sizes.items())
    return options, grid, (np.int32(N), np.int32(K), *map(np.int64, strides))


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), limits={"M": MOST_ROWS},
    instead="gemm/swap_ab", unsupported=lambda of: not_transposed(of.a, of.b, "split_k"), aligned=("a", "b"),
    bind=divided, traffic=traffic, tuning=GEMV,
)  # fmt: skip
def gemv(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *,
    residual: Tensor | None, precision: str, config: GemvConfig, bound: Any,
) -> None:  # fmt: skip
    """a b + bias + residual in exact fp32 FMAs, for at most four rows of a; two runs agree bit for bit."""
    options, grid, numbers = bound
    compiled = _cuda.load(SOURCE, "gemv", options=options, dependent=pdl_is_on())
    compiled(grid, (WARPS * WARP,), a, b, bias, residual, c, *numbers)

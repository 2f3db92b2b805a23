"""Implements the kernel `gemv`, for one to four rows of `a`.  It reads the weight once, 16 bytes per thread.

The kernel improves on `naive`.  A warp computes the results of `rows` rows of the weight, with `rows * unroll` loads in
flight.  If there are too few warps, K is split over the warps of a CTA, then over a cluster.  Partial sums are added in
a fixed order in distributed shared memory.

The memory bandwidth decides the time.  An H100's HBM gives each SM 4 KB of the weight in 282 clocks.  An SM issues 1130
instructions in this time.  The loop needs 230 with one row of `a`, and 487 with four.

With programmatic dependent launch (`pdl()`), a warp requests its first vectors before it waits for the previous kernel.
The loads avoid `ld.global.nc`, because ptxas moves such loads behind the wait.  docs/notes/gemm.md says which latency
this can hide.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._pdl import pdl_is_on
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm import _operands
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Footprint, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme

SOURCE = Path(__file__).with_suffix(".cu").read_text()
MOST_ROWS = 4
"""The most rows of `a`.  Each row costs one FMA per weight; with more rows tensor cores are cheaper."""
WARPS, WARP = 8, 32
"""The number of warps of a CTA, and the number of threads of a warp."""
WARPS_PER_SM = 24
"""The warps per SM that the default config aims at: with 8 vectors of 512 bytes each, 96 KB are in flight."""


@dataclass(frozen=True)
class GemvConfig:
    """A config: how the weight is divided among warps and CTAs."""

    rows: int
    """The number of rows of the weight per warp.  These rows share the loads of `a`."""
    unroll: int
    """The number of vectors of each row that a thread loads at once."""
    warps_k: int
    """The number of warps of a CTA that share a row.  Each takes every `warps_k * split`-th piece of 32 vectors."""
    split: int
    """The number of CTAs of a cluster that share a row."""


def pieces(K: int, scheme: Scheme) -> int:
    """Returns the number of pieces in a row of `K` values.  A piece is one load of a warp: 16 bytes per thread."""
    return int(cdiv(K * scheme.activation.itemsize, WARP * _operands.VECTOR_BYTES))


def footprint(config: GemvConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns a CTA's resources: registers for loaded vectors and sums, and shared memory for the sums of each warp."""
    acc_count = config.rows * min(int(case["M"]), MOST_ROWS)
    return Footprint(
        threads=WARPS * WARP,
        registers=config.rows * config.unroll * _operands.VECTOR_BYTES // 4 + acc_count + 8,
        shared_bytes=4 * WARPS * acc_count,
        ctas=cdiv(int(case["N"]), config.rows * (WARPS // config.warps_k)) * config.split,
    )


def rule(config: GemvConfig, case: Case, scheme: Scheme = BF16) -> bool:
    """Tells whether a config is legal. A thread may have at most 16 vectors in flight. A weight row is read in pieces
    of 512 bytes, one load of a warp each. K may not be split into more parts than a row has pieces."""
    k_splits = config.warps_k * config.split
    shares_fit = k_splits == 1 or k_splits <= pieces(int(case["K"]), scheme)
    return config.rows * config.unroll <= 16 and shares_fit


def fewest_shares(case: Case, scheme: Scheme = BF16) -> GemvConfig:
    """Returns the default config.  It splits K into the fewest shares that give each SM `WARPS_PER_SM` warps."""
    N, load_count = int(case["N"]), pieces(int(case["K"]), scheme)
    rows = 2 if int(case["M"]) <= 2 else 4
    k_splits = 1
    while N * k_splits < HOPPER_SMS * WARPS_PER_SM * rows and 2 * k_splits <= min(load_count, WARPS * 8):
        k_splits *= 2
    return GemvConfig(rows, 8 // rows, warps_k=min(k_splits, WARPS), split=max(k_splits // WARPS, 1))


CONFIGS = space(GemvConfig, rows=(1, 2, 4), unroll=(1, 2, 4, 8), warps_k=(1, 2, 4, 8), split=(1, 2, 4, 8))
TUNING = Tuning(GemvConfig, CONFIGS, fewest_shares, footprint, rule)


def divided(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options: compiler options, the grid, sizes and strides."""
    a, b, config = of.a, of.b, of.config
    (K, N), M = b.shape, a.shape[0]
    compiler_options = _cuda.macros(
        ELEMENT=_cuda.ELEMENT_CODES[a.dtype],
        BYTES=_operands.alignment_bytes(a, b, whole_k=True),
        M=M,
        ROWS=config.rows,
        UNROLL=config.unroll,
        WARPS=WARPS,
        WARPS_K=config.warps_k,
        SPLIT=config.split,
    )
    grid = (cdiv(N, config.rows * (WARPS // config.warps_k)) * config.split,)
    return compiler_options, grid, (np.int32(N), np.int32(K), *map(np.int64, _operands.row_strides(of)))


@kernel(
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("cupy",),
    limits={"M": MOST_ROWS},
    holds=_operands.along_k("a", "b"),
    aligned=("a", "b"),
    bind=divided,
    traffic=_operands.traffic,
    tuning=TUNING,
    over="naive",
    shows={
        "": "below.LDG__128 == 0",
        "M=1,N=4096,K=4096,layout=NT,bias=false": (
            "LDG_E_NA_128 == LDG__NA > 0; "
            "not uses_tensor_cores and loop.fma > loop.shared_load == loop.global_store == stack_bytes == 0; "
            'loop.before("global_load", "fma") >= 8'
        ),
    },
)
def gemv(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    residual: Tensor | None,
    precision: str,
    config: GemvConfig,
    bound: Any,
) -> None:
    """Computes `a @ b + bias + residual` with exact fp32 FMAs for up to four rows of `a`.  Runs agree bit for bit."""
    compiler_options, grid, scalar_args = bound
    compiled_kernel = _cuda.load(SOURCE, "gemv", options=compiler_options, dependent=pdl_is_on())
    compiled_kernel(grid, (WARPS * WARP,), a, b, bias, residual, c, *scalar_args)

"""The kernel `dequant_dot`, for many rows of `a`, converts codes to bf16 in registers before wgmma.

One launch replaces the four launches of `naive`, and reads the weight from HBM once.  A product has up to 128 rows of
`a`.  The fp32 sums are scaled once at the end, so no weight is rounded.  If there are too few tiles for the GPU, K is
split over several CTAs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooflab.kernels.gemm._operands import along_k
from rooflab.kernels.gemm_w8a16._packed import PACKED_ARGUMENT, pack
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import dequant_dot as shared
from rooflab.kernels.lib.dequant_dot import BLOCK_K_8_BITS, Config

BITS = 8


@kernel(
    backend="triton",
    min_sm=90,
    prepare=pack,
    packed=PACKED_ARGUMENT,
    holds=along_k("a"),
    bind=lambda of: shared.arranged(of, BITS, BLOCK_K_8_BITS),
    traffic=shared.traffic,
    fenced_since="3.7.1",
    tuning=shared.tuning(BITS, lambda scheme: BLOCK_K_8_BITS),
    over="gemv",
    shows={
        "M=64,N=28672,K=8192,bias=false in w8a16": (
            r"loop.wgmma > 0 "
            r"and loop.cp_async > loop.mma == loop.shared_store == loop.spill_load == stack_bytes == 0; "
            r'in_sass("HGMMA") == in_sass(r"HGMMA\S* R\d+, R\d+, gdesc"); loop.I2F == 0'
        )
    },
)
def dequant_dot(
    a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, c: Tensor, *, config: Config, bound: Any
) -> None:
    """Computes `a @ (scale * b) + bias` on tensor cores.  `b` is from `pack`.  Two runs agree bit for bit."""
    shared.launch(bound, a, b, scale, None, bias, c)

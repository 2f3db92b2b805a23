"""The kernel `gemv` improves on `naive` for few rows of `a`.  It reads each code of the weight once, into registers.

A warp reads a stream of packed codes (`lib/stream.cu`), and multiplies up to eight rows of `a`.  The conversion of an
int8 code to bf16 is exact.  First the code's seven low bits become a bf16 number from 128 to 255.  Then 128 is
subtracted from this number, or 256 if the code is negative.  The fp32 sums are scaled at the end.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooflab.kernels.gemm._operands import along_k
from rooflab.kernels.gemm_w8a16._packed import PACKED_ARGUMENT, pack
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import stream
from rooflab.kernels.lib.stream import MAX_M, Config

BITS = 8
GROUPS_PER_QUAD = 1
"""The number of groups that a quad of lanes holds: a whole row shares a scale."""


@kernel(
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("cupy",),
    prepare=pack,
    packed=PACKED_ARGUMENT,
    holds={**along_k("a"), f"M <= {MAX_M}": f"M of at most {MAX_M}"},
    aligned=("a",),
    bind=lambda of: stream.divided(of, BITS, GROUPS_PER_QUAD),
    traffic=stream.traffic,
    tuning=stream.tuning(BITS, lambda scheme: GROUPS_PER_QUAD),
    over="naive",
    shows={
        "": 'calls("naive").total >= 4',
        "M={1|8},N=8192,K=8192,bias=false in w8a16": (
            "loop.mma > loop.wgmma == loop.cp_async == loop.shared_load == loop.shared_store == 0; "
            "loop.ldmatrix == stack_bytes == loop.spill_load == loop.SHFL == loop.PRMT == loop.I2F == 0; "
            "loop.LDG_E__NA_128 > 0 and loop.length * 32 / (loop.mma * 256) < 2.5"
        ),
    },
)
def gemv(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, c: Tensor, *, config: Config, bound: Any) -> None:
    """Computes `a @ (scale * b) + bias` for at most eight rows of `a`.  `b` is from `pack`.  Runs agree bit for bit."""
    stream.launch(bound, a, b, scale, None, bias, c)

"""The kernel `dequant_dot`, for many rows of `a`, converts codes to bf16 in registers before wgmma.

One launch replaces the nine launches of `naive`, and reads the weight from HBM once.  A product has up to 128 rows of
`a`.  The sums of each group are scaled in fp32, so no weight is rounded.  If there are too few tiles for the GPU, K is
split over several CTAs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooflab.kernels.gemm_w4a16._packed import CONDITIONS, PACKED_ARGUMENT, pack
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import dequant_dot as shared
from rooflab.kernels.lib.dequant_dot import Config
from rooflab.reference.gemm_w4a16 import group_size
from rooflab.reference.spec import Arguments

BITS = 4


def arranged(of: Arguments) -> Any:
    """Computes the grid, sizes and constants of a launch from its arguments.  A tile has one group along K."""
    return shared.arranged(of, BITS, group_size(of.a.shape[1], of.scale.shape[1]))


@kernel(
    backend="triton",
    min_sm=90,
    prepare=pack,
    packed=PACKED_ARGUMENT,
    holds=CONDITIONS,
    bind=arranged,
    traffic=shared.traffic,
    tuning=shared.tuning(BITS, lambda scheme: scheme.group or 128),
    fenced_since="3.7.1",
    over="gemv",
    shows={
        "M=64,N=28672,K=8192,zeros=false,bias=false in w4a16_g{128|64|32}": (
            r"loop.wgmma > 0 "
            r"and loop.cp_async > loop.mma == loop.shared_store == loop.spill_load == stack_bytes == 0; "
            r'in_sass("HGMMA") == in_sass(r"HGMMA\S* R\d+, R\d+, gdesc")'
        )
    },
)
def dequant_dot(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    c: Tensor,
    *,
    config: Config,
    bound: Any,
) -> None:
    """Computes `a @ ((code - zero) * scale) + bias` on tensor cores.  `b` is from `pack`.  Runs agree bit for bit."""
    shared.launch(bound, a, b, scale, zero, bias, c)

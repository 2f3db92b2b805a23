"""The kernel `gemv` improves on `naive` for few rows of `a`.  It reads each code of the weight once, into registers.

A warp reads packed codes (`lib/stream.cu`) with 4 KB in flight.  The conversion of codes to bf16 is exact.  A code is
put into the low bits of a power of two, and a subtraction removes this power (Kim et al., arXiv 2211.10017, section 3).
The sums of each group (codes with the same scale) are scaled in fp32, so no weight is rounded.

mma.m16n8k16 multiplies 16 rows of the weight by eight columns.  Four lanes load 128 codes of a weight row at once, from
one, two or four groups.  The groups need separate sums.  So each row of `a` takes one column per group, at most four of
the eight columns.

K is split over warps and CTAs until one wave of CTAs fills the GPU.  Partial sums are added in a fixed order, so two
runs agree bit for bit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooflab.kernels.gemm_w4a16._packed import CHUNK_K, CONDITIONS, PACKED_ARGUMENT, pack, subgroups
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import stream
from rooflab.kernels.lib.stream import MAX_COLUMNS, MAX_M, Config
from rooflab.reference.gemm_w4a16 import group_size
from rooflab.reference.spec import Arguments

BITS = 4
GROUP_32_MAX_ROWS = MAX_COLUMNS // subgroups(32)
"""The most rows of `a` that the kernel multiplies with groups of 32."""


def divided(of: Arguments) -> Any:
    """Divides the work of a call over warps and CTAs.  `of` holds the call's arguments.  `stream.launch` takes the
    result."""
    return stream.divided(of, BITS, subgroups(group_size(of.a.shape[1], of.scale.shape[1])))


@kernel(
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("cupy",),
    prepare=pack,
    packed=PACKED_ARGUMENT,
    holds={
        **CONDITIONS,
        f"M <= {MAX_M}": f"M of at most {MAX_M}",
        f"M <= {GROUP_32_MAX_ROWS} or 64 * G < K + 64": f"at most {GROUP_32_MAX_ROWS} rows with groups of 32",
    },
    aligned=("a",),
    bind=divided,
    traffic=stream.traffic,
    tuning=stream.tuning(BITS, lambda scheme: subgroups(scheme.group or CHUNK_K)),
    over="naive",
    shows={
        "": 'calls("naive").total >= 8',
        "M=1,N=8192,K=8192,zeros={false|true},bias=false in w4a16_g{128|64|32}": (
            "loop.mma > loop.wgmma == loop.cp_async == loop.shared_load == loop.shared_store == 0; "
            "loop.ldmatrix == stack_bytes == loop.spill_load == loop.SHFL == loop.PRMT == loop.I2F == 0; "
            "loop.LDG_E__NA_128 > 0 and loop.length * 32 / (loop.mma * 256) < 2.2"
        ),
    },
)
def gemv(
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
    """Computes `a @ W + bias`.  `b` is the packed weight `pack(W)`.  `a` may have up to eight rows.  If only 32 codes
    share a scale, it may have up to four."""
    stream.launch(bound, a, b, scale, zero, bias, c)

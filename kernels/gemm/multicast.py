"""Implements the kernel `multicast` in CUDA C++.  Two CTAs of a cluster load their common columns of `b` once.

The kernel improves on `cooperative`, where an SM reads 48 bytes per clock from L2.  Here each CTA loads half of the
tile of `b`, and TMA writes it into the shared memory of both CTAs (multicast).  So an SM reads 32 bytes per clock.
Both CTAs wait for the slower CTA.

The design is that of CUTLASS's cooperative GEMM with a cluster of 2 x 1 (NVIDIA, CUTLASS 3.x, example 48).  Gluon 3.6
has no multicast, so the kernel is CUDA C++.  It was not measured on a GPU.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tensor_map import CudaMap
from rooflab.kernels.gemm import _operands
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import multicast as shared
from rooflab.kernels.lib.multicast import ClusterTile
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.kernels.tuning import Defaults, Tuning
from rooflab.reference.spec import DTYPE_NAMES

DEFAULTS = Defaults(
    (({"narrow_tiles": HOPPER_SMS}, ClusterTile(2, 128, 6, 16, 2)), ({}, ClusterTile(2, 256, 4, 16, 2))),
    sizes=lambda case, scheme: {"narrow_tiles": cdiv(int(case["M"]), 128) * cdiv(int(case["N"]), 128)},
)
"""The default tiles: narrow if all fit in a wave, else wide.  The deepest ring that fits beside two staged boxes."""
TUNING = Tuning(ClusterTile, shared.tiles(consumers=(2,), block_n=(128, 256)), DEFAULTS, shared.footprint)


@kernel(
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("cupy",),
    dtypes={"a": HALF_DTYPES},
    unsupported=partial(_operands.why_not_by_tma, stores=True, residual=True),
    aligned=("a", "b", "residual"),
    empty=_operands.epilogue_alone,
    traffic=_operands.tiles_traffic,
    tuning=TUNING,
    over="cooperative",
    shows={
        "": (
            "len(products) == 1 and loop.wgmma == 4 and loop.global_load == loop.spill_load == 0; "
            "UTMALDG_2D_MULTICAST == 2 and UTMALDG_2D == 4 and below.UTMALDG_2D_MULTICAST == 0; "
            "threads == 384 and stack_bytes == 0 and ctas % 2 == 0"
        )
    },
)
def multicast(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    residual: Tensor | None,
    precision: str,
    config: ClusterTile,
) -> None:
    """Computes `a @ b + bias + residual` on tensor cores, in fp32, rounded once.  TMA multicasts `b` to two CTAs."""
    (a_rows, b_rows), c_rows = _operands.stored_operands(a, b), _operands.stored_output(c)
    addend = (c, c_rows) if residual is None else (residual, _operands.stored_as(residual, False))
    cuda_maps = [CudaMap(matrix, *rows[:3]) for matrix, rows in ((a, a_rows), (b, b_rows), (c, c_rows), addend) if rows]
    shared.launch(
        DTYPE_NAMES[a.dtype],
        config,
        cuda_maps,
        (*a.shape[:1], *b.shape[1:], *a.shape[1:]),
        along_k=(not a_rows.transposed, b_rows.transposed),
        bias=bias,
        residual=residual is not None,
    )

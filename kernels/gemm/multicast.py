"""Over cooperative, in CUDA C++: a cluster of two CTAs loads the columns of b that both need once.

cooperative asks L2 for 48 KB for 64 of K in a tile of 128 x 256, which are 48 bytes per clock and SM at the rate of the
tensor cores.  Here two CTAs of a cluster have tiles one below the other; each loads half of b's tile, and TMA writes it
into the shared memory of both (multicast): 32 KB, 32 bytes per clock.  Gluon 3.6 cannot say that; so the kernel is CUDA
C++, with tensor maps that the host encodes by the driver's call.  The rest is cooperative's design (CUTLASS's
cooperative warp-specialized GEMM with a cluster of 2 x 1, NVIDIA, CUTLASS 3.x, example 48): one product in flight,
registers moved to the consumers, a persistent walk over tiles.  A tile is stored in boxes of 64 columns, of which a
consumer stages two, so four slots of the ring fit beside them; a residual comes by TMA into the same boxes.

Both CTAs wait for the slower of them: a slot is free when the consumers of both have read it.  `cluster=1` is the same
kernel without multicast, so that a GPU can judge it alone.  Unmeasured on a GPU.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rooflab.kernels import _multicast
from rooflab.kernels._multicast import Config
from rooflab.kernels._tensor_map import CudaMap
from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm._tiled import traffic
from rooflab.kernels.gemm._tiles import GROUP_ROWS, quickest
from rooflab.kernels.gemm._tma import stored_as, stored_operands, stored_output, why_not_moved
from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import DTYPE_NAMES, Case, Scheme

OPERAND_BYTES = 2


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Two widths, rings of several depths, with a cluster and without."""
    sizes = itertools.product((2,), (128, 256), (3, 4, 5, 6), (8, 16), (1, 2, 4), (1, 2))
    return tuple(itertools.starmap(Config, sizes))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """One fp32 accumulator per consumer; the ring, the staged boxes and the barriers."""
    return _multicast.footprint(config, int(case["M"]), int(case["N"]), int(case["K"]), OPERAND_BYTES, 1)


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, and boxes divide evenly."""
    return config.divides and footprint(config, case, scheme).fits


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The quicker of two widths, with the deepest ring beside two staged boxes."""
    group = GROUP_ROWS // 128
    return quickest([Config(2, 256, 4, group, 2, 2), Config(2, 128, 6, group, 2, 2)], case, scheme)


def unsupported(inputs: Arguments) -> str | None:
    """Why TMA cannot load or store these operands, or wgmma cannot multiply them."""
    if inputs.a.dtype == torch.float32:
        return "a: expected torch.float16 or torch.bfloat16, got torch.float32; gemm/cooperative takes it in tf32"
    return why_not_moved(inputs)


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), unsupported=unsupported,
    aligned=("a", "b", "residual"), empty=epilogue_alone, traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def multicast(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *, residual: Tensor | None, precision: str, config: Config
) -> None:
    """a b + bias + residual on Hopper's tensor cores, accumulated in fp32 and rounded once; b is multicast."""
    (left, right), kept = stored_operands(a, b), stored_output(c, "pipelined")
    added = (c, kept) if residual is None else (residual, stored_as(residual, False))
    maps = [CudaMap(base, *matrix[:3]) for base, matrix in ((a, left), (b, right), (c, kept), added) if matrix]
    _multicast.launch(
        DTYPE_NAMES[a.dtype], config, maps, (*a.shape[:1], *b.shape[1:], *a.shape[1:]),
        along_k=(not left.transposed, right.transposed), bias=bias, residual=residual is not None,
    )  # fmt: skip

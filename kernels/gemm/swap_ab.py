"""Over split_k: exchanges the operands (C^T = W A^T), so the weight's rows are wgmma's M = 64 and the batch its N.

wgmma computes 64 rows by n columns, n a multiple of 8: a batch of 1 is padded to 8 as columns, but to 64 as rows
(CUTLASS issue 1176 and DeepGEMM say the same).  If there are too few tiles of 64 or 128 rows of the weight for the SMs,
K is split over a cluster of CTAs.  Their partial sums meet in distributed shared memory in a fixed order, without a
workspace, a second launch, or a counter that must be zero before the next launch.

Tried, predicted, not built: docs/notes/gemm.md.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from rooflab.kernels import _cuda
from rooflab.kernels._checks import output
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._pdl import pdl_is_on
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.gemm._operands import check_operands
from rooflab.kernels.gemm._skinny_operands import (
    VECTOR_BYTES,
    alignment_bytes,
    element_bytes,
    not_transposed,
    row_stride,
)
from rooflab.kernels.gemm._skinny_swap import source
from rooflab.kernels.gemm._tiled import config_of
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

LOADERS = 128 + 32
"""Threads that load the weight, and a; for each 64 rows of the weight 128 more threads multiply."""
PIECE_BYTES = 128
"""Bytes of a row along K: the widest swizzle."""
MOST_COLUMNS = 64
"""Rows of a per tile; each further tile of rows reads the weight again."""
RING_BYTES = 112 * 1024
"""Half of an SM's shared memory: two CTAs fit, and a single one keeps over 80 KB in flight."""
LEAST_CTAS = 9 * HOPPER_SMS // 10


@dataclass(frozen=True)
class Config:
    """A tile, the depth of its ring, and the split of K."""

    block_m: int
    """Rows of a: the N of wgmma."""
    block_n: int
    """Rows of the weight: 64 per warpgroup."""
    block_k: int
    num_stages: int
    split: int
    """CTAs of a cluster, which share a tile's K."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles of one to four warpgroups, one or two pieces of 128 bytes deep, with rings up to an SM's memory."""
    piece = PIECE_BYTES // element_bytes(scheme)
    sides = itertools.product((_columns(case),), (64, 128, 256), (piece, 2 * piece))
    return tuple(
        Config(*tile, num_stages, split)
        for tile in sides
        for num_stages, split in itertools.product((3, 4, 5, 6, 8, 12), (1, 2, 4, 8))
    )


def _columns(case: Case) -> int:
    return min(max(int(next_power_of_2(int(case["M"]))), 8), MOST_COLUMNS)


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """A ring of tiles in shared memory, reused for the sums; accumulators in registers."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    depth = cdiv(cdiv(K, config.block_k), config.split) * config.block_k
    return Footprint(
        threads=LOADERS + 2 * config.block_n,
        registers=config.block_m // 2 + 24,
        shared_bytes=config.num_stages * (config.block_m + config.block_n) * config.block_k * element_bytes(scheme),
        ctas=cdiv(M, config.block_m) * cdiv(N, config.block_n) * config.split,
        tensor_flops=2.0 * config.block_m * config.block_n * depth,
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, every share of K has a tile of K, and the ring has room for the sums.

    A thread's rows must be 8 or 16 apart, so that their swizzle is the same: tiles are one or two pieces deep.
    """
    needs = footprint(config, case, scheme)
    if config.block_k * element_bytes(scheme) not in (PIECE_BYTES, 2 * PIECE_BYTES):
        return False
    room = config.block_m * (config.block_n + 4) * 4 <= needs.shared_bytes
    return room and needs.fits and (config.split == 1 or config.split * config.block_k <= int(case["K"]))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """Tiles of 128 rows if the tile of a is worth sharing, then the least split that gives every SM a CTA.

    If possible all CTAs run at once, two per SM: they share the bandwidth, so one more CTA on some SMs costs nothing,
    but a second wave would.
    """
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    block_m = _columns(case)
    block_n = 128 if block_m > 16 or N >= 128 * HOPPER_SMS else 64
    piece = PIECE_BYTES // element_bytes(scheme)
    # Longer runs of a row, if four stages or more still fit.
    block_k = 2 * piece if block_m + block_n <= 96 else piece
    tiles = cdiv(M, block_m) * cdiv(N, block_n)
    split = 1
    while tiles * split < LEAST_CTAS and split < 8 and 8 * split * block_k <= K:
        split *= 2
    stage = (block_m + block_n) * block_k * element_bytes(scheme)
    return Config(block_m, block_n, block_k, min(RING_BYTES // stage, 8), split)


ELEMENTS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 1}
"""The number that the source uses for each dtype."""
KINDS = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once, the weight once per 64 rows of a; sums stay in the cluster."""
    a, b = inputs.a, inputs.b
    M, N = a.shape[0], b.shape[1]
    config = inputs.config or config_of("swap_ab", a, b, inputs.residual, inputs.precision)
    tiles_m = max(cdiv(M, config.block_m), 1)
    return Traffic(
        read_bytes=nbytes(a, inputs.bias, inputs.residual) + tiles_m * nbytes(b), write_bytes=M * N * a.element_size()
    )


def why_not_taken(a: torch.Tensor, b: torch.Tensor, precision: str) -> str | None:
    """Why this kernel cannot take the operands, or None."""
    if a.dtype == torch.float32 and precision == "ieee":
        return "wgmma rounds fp32 to TF32, which precision='ieee' does not allow; gemm/split_k takes it"
    reason = not_transposed(a, b, "split_k")
    if reason is None and alignment_bytes(a, b, whole_k=False) < VECTOR_BYTES:
        return "cp.async needs rows of a and b at multiples of 16 bytes; gemm/split_k takes any"
    return reason


@register(
    op="gemm", name="swap_ab", role="optimized", backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",),
    traffic=traffic, unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b, inputs.precision),
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    precision: str = "ieee",
    config: Config | None = None,
) -> torch.Tensor:
    """a b + bias + residual on wgmma, accumulated in fp32, for few rows of a; two runs agree bit for bit.

    a: (M, K), stride 1 along K; b: (K, N), a transposed row-major (N, K) weight; rows of both at multiples of 16 bytes;
    bias: (N,); residual: (M, N); returns (M, N).  fp16, bf16, or fp32 with `precision="tf32"`.  Written for M <= 64;
    reads the weight again for every 64 rows more.  Raises `ValueError` on other operands.
    """
    M, N, K = check_operands(a, b, bias, residual, precision)
    reason = why_not_taken(a, b, precision)
    if reason:
        raise ValueError(f"a, b: {reason}")
    out = output(out, (M, N), a)
    if not out.numel():
        return out
    config = config or config_of("swap_ab", a, b, residual, precision)
    sizes = {
        "ELEMENT": ELEMENTS[a.dtype],
        "BLOCK_M": config.block_m,
        "WARPGROUPS": config.block_n // 64,
        "PIECES": config.block_k * a.element_size() // PIECE_BYTES,
        "STAGES": config.num_stages,
        "SPLIT": config.split,
    }
    options = tuple(f"-D{name}={value}" for name, value in sizes.items())
    kernel = _cuda.load(source(KINDS[a.dtype], config.block_m), "swap_ab", options=options, dependent=pdl_is_on())
    kernel(
        (cdiv(N, config.block_n) * config.split, cdiv(M, config.block_m)),
        (LOADERS + 2 * config.block_n,),
        a,
        b,
        bias,
        residual,
        out,
        *(np.int32(size) for size in (M, N, K, cdiv(cdiv(K, config.block_k), config.split))),
        np.int64(row_stride(a, 0)),
        np.int64(row_stride(b, 1)),
        np.int64(residual.stride(0) if residual is not None else 0),
        np.int64(out.stride(0)),
        shared_bytes=config.num_stages * (config.block_m + config.block_n) * config.block_k * a.element_size(),
    )
    return out

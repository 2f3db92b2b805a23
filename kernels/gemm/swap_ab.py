"""Over split_k: the operands change places, so that the weight's rows are wgmma's 64 and the batch its 8 to 64.

C^T = W A^T.  wgmma computes 64 rows by n columns, n any multiple of 8: with the batch in the rows' place a batch of 1
would be padded to 64, here it is padded to 8 (CUTLASS issue 1176 and DeepGEMM say the same).  Where the tiles of 64 or
128 rows of the weight are too few for the SMs, K is split over a cluster of CTAs, whose partial sums meet in
distributed shared memory: in a fixed order, with no workspace, no second launch, and no counter that a next launch
would have to find at zero.

The tiles come by cp.async into the layout that wgmma reads, not by TMA: a tensor map needs the driver and a place in
`_cuda.py`, cp.async takes an edge anywhere in a row, and at HBM's rate it takes a seventh of what an SM can issue.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import triton

from rooflab.kernels import _cuda
from rooflab.kernels._checks import output
from rooflab.kernels._device import HOPPER_SMS
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

LOADERS = 128
"""Threads that fill the ring; each 64 rows of the weight have 128 more that multiply."""
PIECE_BYTES = 128
"""Of a row, along K: the widest swizzle."""
MOST_COLUMNS = 64
"""Rows of a in one tile; more are tiles of their own, and read the weight again."""
RING_BYTES = 112 * 1024
"""Half of what an SM has for its CTAs: two fit, and where there is one it has over 80 KB on its way."""
LEAST_CTAS = 9 * HOPPER_SMS // 10


@dataclass(frozen=True)
class Config:
    """A tile, how deep its ring is, and how K is shared out."""

    block_m: int
    """Rows of a: wgmma's n."""
    block_n: int
    """Rows of the weight: 64 for each warpgroup."""
    block_k: int
    num_stages: int
    split: int
    """CTAs of a cluster that share a tile's K."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles of one to four warpgroups, one or two pieces of 128 bytes deep, rings up to an SM's memory."""
    piece = PIECE_BYTES // element_bytes(scheme)
    sides = itertools.product((_columns(case),), (64, 128, 256), (piece, 2 * piece))
    return tuple(
        Config(*tile, num_stages, split)
        for tile in sides
        for num_stages, split in itertools.product((3, 4, 5, 6, 8, 12), (1, 2, 4, 8))
    )


def _columns(case: Case) -> int:
    return min(max(int(triton.next_power_of_2(int(case["M"]))), 8), MOST_COLUMNS)


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """A ring of tiles in shared memory, in whose place the sums stand at the end; accumulators in registers."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    depth = triton.cdiv(triton.cdiv(K, config.block_k), config.split) * config.block_k
    return Footprint(
        threads=LOADERS + 2 * config.block_n,
        registers=config.block_m // 2 + 24,
        shared_bytes=config.num_stages * (config.block_m + config.block_n) * config.block_k * element_bytes(scheme),
        ctas=triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n) * config.split,
        tensor_flops=2.0 * config.block_m * config.block_n * depth,
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """What fits an SM, with at least one tile of K for every share of it, and room for the sums.

    A thread's rows are 8 or 16 apart, so that the swizzle is the same in all of them: tiles are one or two pieces deep.
    """
    needs = footprint(config, case, scheme)
    if config.block_k * element_bytes(scheme) not in (PIECE_BYTES, 2 * PIECE_BYTES):
        return False
    room = config.block_m * (config.block_n + 4) * 4 <= needs.shared_bytes
    return room and needs.fits and (config.split == 1 or config.split * config.block_k <= int(case["K"]))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """Tiles of 128 rows where a's tile is worth sharing, then the least split that gives every SM a CTA.

    All CTAs fit at once where they can, two on an SM: bandwidth is shared among those that ask for it, so that a CTA
    more on some SMs costs nothing, and a second wave would.
    """
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    block_m = _columns(case)
    block_n = 128 if block_m > 16 or N >= 128 * HOPPER_SMS else 64
    piece = PIECE_BYTES // element_bytes(scheme)
    # Longer runs of a row where that still leaves four stages or more.
    block_k = 2 * piece if block_m + block_n <= 96 else piece
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    split = 1
    while tiles * split < LEAST_CTAS and split < 8 and 8 * split * block_k <= K:
        split *= 2
    stage = (block_m + block_n) * block_k * element_bytes(scheme)
    return Config(block_m, block_n, block_k, min(RING_BYTES // stage, 8), split)


ELEMENTS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 1}
"""What the source calls each dtype."""
KINDS = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once, the weight once for every 64 rows of a; sums never leave an SM's cluster."""
    a, b, config = inputs.a, inputs.b, inputs.config
    M, N = a.shape[0], b.shape[1]
    tiles_m = max(triton.cdiv(M, config.block_m if config else MOST_COLUMNS), 1)
    return Traffic(
        read_bytes=nbytes(a, inputs.bias, inputs.residual) + tiles_m * nbytes(b), write_bytes=M * N * a.element_size()
    )


def why_not_taken(a: torch.Tensor, b: torch.Tensor, precision: str) -> str | None:
    """Why these operands are for another rung."""
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
    bias: (N,); residual: (M, N); returns (M, N).  fp16, bf16, or fp32 with `precision="tf32"`.  Written for M up to 64;
    beyond it reads the weight again for every 64 rows.  Raises `ValueError` on anything else.
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
    kernel = _cuda.load(source(KINDS[a.dtype], config.block_m), "swap_ab", options=options)
    kernel(
        (triton.cdiv(N, config.block_n) * config.split, triton.cdiv(M, config.block_m)),
        (LOADERS + 2 * config.block_n,),
        a,
        b,
        bias,
        residual,
        out,
        *(np.int32(size) for size in (M, N, K, triton.cdiv(triton.cdiv(K, config.block_k), config.split))),
        np.int64(row_stride(a, 0)),
        np.int64(row_stride(b, 1)),
        np.int64(residual.stride(0) if residual is not None else 0),
        np.int64(out.stride(0)),
        shared_bytes=config.num_stages * (config.block_m + config.block_n) * config.block_k * a.element_size(),
    )
    return out

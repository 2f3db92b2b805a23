"""Over naive, for one to four rows of a: the weight's rows are read once, 16 bytes a thread at a time, and reduced in
a warp.

A product with so few rows is a stream of weights: no tile, no tensor core and no shared memory are in its way.  A warp
takes `rows` rows of the weight and asks for `rows * unroll` vectors before it uses the first.  Where that leaves too
few warps, K is split over the warps of a CTA, and then over a cluster of CTAs, whose partial sums meet in distributed
shared memory: in a fixed order, with no second launch and no workspace.
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
from rooflab.kernels.configs import default_config
from rooflab.kernels.gemm._operands import check_operands, traffic
from rooflab.kernels.gemm._skinny_gemv import SOURCE
from rooflab.kernels.gemm._skinny_operands import (
    VECTOR_BYTES,
    alignment_bytes,
    element_bytes,
    not_transposed,
    row_stride,
)
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

MOST_ROWS = 4
"""Rows of a: each costs an FMA for each weight, and from here on tensor cores are cheaper."""
WARPS = 8
WARPS_PER_SM = 24
"""Warps that the heuristic wants on each SM: with 8 vectors of 512 bytes each, 96 KB are on their way."""
WARP = 32


@dataclass(frozen=True)
class Config:
    """How the weight is shared out."""

    rows: int
    """Rows of the weight that a warp reduces side by side: what it reads of a serves them all."""
    unroll: int
    """Vectors of each row that are asked for at once."""
    warps_k: int
    """Warps of a CTA that share a row, each with every `warps_k * split`-th piece of 32 vectors."""
    split: int
    """CTAs, a cluster, that share a row."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Up to 16 vectors in flight a thread, and every way to split K."""
    return tuple(Config(*values) for values in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)))


def pieces(K: int, scheme: Scheme) -> int:
    """Loads of a whole warp in a row, at the widest."""
    return int(triton.cdiv(K * element_bytes(scheme), WARP * VECTOR_BYTES))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Vectors in flight and one sum for each of a's rows in registers; one sum of each warp in shared memory."""
    M, N = int(case["M"]), int(case["N"])
    sums = config.rows * min(M, MOST_ROWS)
    return Footprint(
        threads=WARPS * WARP,
        registers=config.rows * config.unroll * VECTOR_BYTES // 4 + sums + 8,
        shared_bytes=4 * WARPS * sums,
        ctas=triton.cdiv(N, config.rows * (WARPS // config.warps_k)) * config.split,
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """No more than 16 vectors in flight a thread, and for each share of K at least one piece."""
    shares = config.warps_k * config.split
    return (
        config.rows * config.unroll <= 16
        and (shares == 1 or shares <= pieces(int(case["K"]), scheme))
        and footprint(config, case, scheme).fits
    )


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """As few shares of K as give every SM its warps, and no more than K has pieces."""
    N, most = int(case["N"]), pieces(int(case["K"]), scheme)
    rows = 2 if int(case["M"]) <= 2 else 4
    wanted = HOPPER_SMS * WARPS_PER_SM * rows
    shares = 1
    while N * shares < wanted and 2 * shares <= min(most, WARPS * 8):
        shares *= 2
    return Config(rows, 8 // rows, warps_k=min(shares, WARPS), split=max(shares // WARPS, 1))


ELEMENTS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 1}
"""What the source calls each dtype."""


def why_not_taken(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why these operands are for another rung."""
    if a.shape[0] > MOST_ROWS:
        return f"takes up to {MOST_ROWS} rows of a, got {a.shape[0]}; gemm/swap_ab takes more"
    return not_transposed(a, b, "split_k")


@register(
    op="gemm", name="gemv", role="optimized", backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",),
    traffic=traffic, unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b),
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
    """a b + bias + residual in fp32 FMAs, for at most four rows of a; two runs agree bit for bit.

    a: (M, K), M <= 4, stride 1 along K; b: (K, N), a transposed row-major (N, K) weight; bias: (N,); residual: (M, N);
    returns (M, N).  fp32, fp16 or bf16; fp32 stays fp32 also where `precision` would allow TF32.  Rows whose addresses
    are no multiples of 16 bytes are read in narrower pieces.  Raises `ValueError` on anything else.
    """
    M, N, K = check_operands(a, b, bias, residual, precision)
    reason = why_not_taken(a, b)
    if reason:
        raise ValueError(f"{'a' if M > MOST_ROWS or reason.startswith('a ') else 'b'}: {reason}")
    out = output(out, (M, N), a)
    if not out.numel():
        return out
    config = config or default_config("gemm", "gemv", a.dtype, a.device, M=M, N=N, K=K)
    sizes = {
        "ELEMENT": ELEMENTS[a.dtype],
        "BYTES": alignment_bytes(a, b, whole_k=True),
        "M": M,
        "ROWS": config.rows,
        "UNROLL": config.unroll,
        "WARPS": WARPS,
        "WARPS_K": config.warps_k,
        "SPLIT": config.split,
    }
    kernel = _cuda.load(SOURCE, "gemv", options=tuple(f"-D{name}={value}" for name, value in sizes.items()))
    kernel(
        (triton.cdiv(N, config.rows * (WARPS // config.warps_k)) * config.split,),
        (WARPS * WARP,),
        a,
        b,
        bias,
        residual,
        out,
        np.int32(N),
        np.int32(K),
        np.int64(row_stride(a, 0)),
        np.int64(row_stride(b, 1)),
        np.int64(residual.stride(0) if residual is not None else 0),
        np.int64(out.stride(0)),
    )
    return out

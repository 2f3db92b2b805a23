"""Over split_k: exchanges the operands (C^T = W A^T), so the weight's rows are wgmma's M = 64 and the batch its N.

wgmma computes 64 rows by n columns, n a multiple of 8: a batch of 1 is padded to 8 as columns, but to 64 as rows
(CUTLASS issue 1176 and DeepGEMM say the same).  If there are too few tiles of 64 or 128 rows of the weight for the SMs,
K is split over a cluster of CTAs.  Their partial sums meet in distributed shared memory in a fixed order, without a
workspace, a second launch, or a counter that must be zero before the next launch.

Tried, predicted, not built: docs/notes/gemm.md.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._hopper_device import BARRIERS, products
from rooflab.kernels._pdl import DEPENDENT, pdl_is_on
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import panels_traffic, row_stride
from rooflab.kernels.gemm._skinny_configs import LOADERS, PIECE_BYTES, SWAP_AB, SwapAbConfig
from rooflab.kernels.gemm._skinny_operands import ELEMENTS, VECTOR_BYTES, alignment_bytes, not_transposed, weight_stride
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic

KINDS = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def traffic(inputs: Arguments) -> Traffic:
    """The weight once per tile of rows of a; sums stay in the cluster."""
    return panels_traffic(inputs, inputs.config.block_m)


TYPES = {"bf16": ("bf16.bf16", 16), "fp16": ("f16.f16", 16), "tf32": ("tf32.tf32", 8)}
"""By kind of operands: the types in the opcode, and K of an instruction (PTX ISA 8.7, `wgmma.mma_async`)."""


@cache
def source(kind: str, n: int) -> str:
    """The source for operands of `kind` and products of 64 rows of the weight with `n` rows of a."""
    types, k = TYPES[kind]
    return (
        DEPENDENT
        + BARRIERS
        + products(n, types, k, None if kind == "tf32" else (False, False))
        + Path(__file__).with_suffix(".cu").read_text()
    )


def unsupported(inputs: Arguments) -> str | None:
    """Why this kernel cannot take the operands, or None."""
    a, b = inputs.a, inputs.b
    if a.dtype == torch.float32 and inputs.precision == "ieee":
        return "precision: expected tf32, to which wgmma rounds fp32, got ieee; gemm/split_k takes it"
    reason = not_transposed(a, b, "split_k")
    if reason is None and alignment_bytes(a, b, whole_k=False) < VECTOR_BYTES:
        return "a, b: expected rows at multiples of 16 bytes for cp.async, got others; gemm/split_k takes any"
    return reason


def divided(of: Arguments) -> Any:
    """Of a layout: source, options of the compiler, grid, threads, sizes and strides, bytes of shared memory."""
    a, b, config = of.a, of.b, of.config
    (K, N), M, size = b.shape, a.shape[0], a.element_size()
    sizes = {
        "ELEMENT": ELEMENTS[a.dtype],
        "BLOCK_M": config.block_m,
        "WARPGROUPS": config.block_n // 64,
        "PIECES": config.block_k * size // PIECE_BYTES,
        "STAGES": config.num_stages,
        "SPLIT": config.split,
    }
    strides = weight_stride(a, 0), weight_stride(b, 1), row_stride(of.residual), of.c.stride(0)
    steps = cdiv(cdiv(K, config.block_k), config.split)
    return (
        source(KINDS[a.dtype], config.block_m), tuple(f"-D{name}={value}" for name, value in sizes.items()),
        (cdiv(N, config.block_n) * config.split, cdiv(M, config.block_m)), (LOADERS + 2 * config.block_n,),
        (*map(np.int32, (M, N, K, steps)), *map(np.int64, strides)),
        config.num_stages * (config.block_m + config.block_n) * config.block_k * size,
    )  # fmt: skip


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), unsupported=unsupported, aligned=("a", "b"),
    bind=divided, traffic=traffic, tuning=SWAP_AB,
)  # fmt: skip
def swap_ab(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *,
    residual: Tensor | None, precision: str, config: SwapAbConfig, bound: Any,
) -> None:  # fmt: skip
    """a b + bias + residual on wgmma, accumulated in fp32; every 64 rows of a read the weight again."""
    code, options, grid, threads, numbers, shared_bytes = bound
    compiled = _cuda.load(code, "swap_ab", options=options, dependent=pdl_is_on())
    compiled(grid, threads, a, b, bias, residual, c, *numbers, shared_bytes=shared_bytes)

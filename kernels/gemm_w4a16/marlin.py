"""Calls the authors' package `marlin` (Frantar et al., arXiv 2408.11743), for comparison.

Marlin accepts only symmetric codes, groups of 128 and fp16.  The call converts the activation to fp16 and the result to
bf16.  The measured time includes these two small launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.traffic import steps
from rooflab.reference.contract import Packed
from rooflab.reference.quantization import INT4_ZERO
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

GROUP_SIZE = 128
SIZE_MULTIPLES = {"N": 256, "K": 128}
SCALE_TILE = 8
"""The size of a tile of scales.  64 neighbours along N are stored as a transposed tile of 8 x 8."""


@dataclass(frozen=True)
class MarlinWeight(Packed):
    """Holds a weight's codes (N, K/2) in the layout of `marlin.Layer.pack`, and a workspace that stays all zeros."""

    scales: Tensor
    """The scales (K / 128, N) fp16, in Marlin's order."""
    workspace: Tensor


def pack(b: torch.Tensor, scale: torch.Tensor) -> MarlinWeight:
    """Packs a weight for the package `marlin`.  `b` has the codes, uint8 `[N, K / 2]`.  Marlin's own function packs
    them.  It divides a weight by its scales, so it gets the codes as the weight, and scales of 1.  `scale`, the real
    scales, is only put in Marlin's order.

    Raises `ValueError` unless N is a positive multiple of 256, and K a positive multiple of 128."""
    N, K = b.shape[0], 2 * b.shape[1]
    for (name, size_multiple), dim_size in zip(SIZE_MULTIPLES.items(), (N, K), strict=True):
        if dim_size % size_multiple or not dim_size:
            raise ValueError(f"b: expected {name} in multiples of {size_multiple} for Marlin, got {dim_size}")
    codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1)
    fp16_linear = torch.nn.Linear(K, N, bias=False, dtype=torch.half, device=b.device)
    fp16_linear.weight.data = codes.half() - INT4_ZERO
    marlin_module: Any = import_module("marlin")
    marlin_layer = marlin_module.Layer(K, N, groupsize=GROUP_SIZE).to(b.device)
    marlin_layer.pack(fp16_linear, torch.ones((N, K // GROUP_SIZE), dtype=torch.half, device=b.device))
    scale_tiles = scale.mT.to(torch.half).reshape(scale.shape[1], -1, SCALE_TILE, SCALE_TILE)
    ordered_scales = scale_tiles.transpose(2, 3).reshape(scale.shape[1], N)
    return MarlinWeight(marlin_layer.B, (N, K // 2), b.dtype, ordered_scales, marlin_layer.workspace)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of every operand of Marlin's matmul once, and the bytes of both dtype conversions."""
    a = inputs.a
    M, (N, half_K) = a.shape[0], inputs.b.shape
    scales, result = 2 * inputs.scale.numel(), 2 * M * N
    return steps(
        (nbytes(a), nbytes(a)), (nbytes(a, inputs.zero, inputs.bias) + N * half_K + scales, result), (result, result)
    )


@kernel(
    role="peer",
    backend="cuda",
    min_sm=80,
    devices=("cuda",),
    requires=("marlin",),
    prepare=pack,
    packed=MarlinWeight,
    holds={
        "G > 1": "several groups, because Marlin reads a single one in the order of scales of channels",
        f"G * {GROUP_SIZE} == K": f"groups of {GROUP_SIZE} for Marlin",
        f"N % {SIZE_MULTIPLES['N']} == 0 < N": f"N in multiples of {SIZE_MULTIPLES['N']} for Marlin",
    },
    off={"zero": "Marlin has no zero points", "bias": "Marlin adds no bias"},
    traffic=traffic,
)
def marlin(a: Tensor, b: MarlinWeight, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Tensor:
    """Computes `a @ W` by `marlin.mul`.  `b` is `pack(W)`.  The values of `a` must be in the range of fp16."""
    result = torch.empty((a.shape[0], b.shape[0]), dtype=torch.half, device=a.device)
    if result.numel():
        marlin_module: Any = import_module("marlin")
        marlin_module.mul(a.to(torch.half).contiguous(), b.tensor, result, b.scales, b.workspace)
    return result.to(a.dtype)

"""Peer: Marlin (Frantar et al., arXiv 2408.11743), the package `marlin` of its authors: symmetric, groups of 128, fp16.

Marlin multiplies only fp16.  The call converts the activation to fp16 and the result to bf16: its time includes two
small launches that a model in fp16 would not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._traffic import steps
from rooflab.kernels.gemm_w4a16._operands import SYMMETRIC_ZERO, check_all_but_b
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

GROUP = 128
MULTIPLES = {"N": 256, "K": 128}
SCALE_TILE = 8
"""Scales of 64 neighbours along N are stored as an 8 x 8 tile, transposed."""


@dataclass(frozen=True)
class MarlinWeight:
    """Codes in the layout of `marlin.Layer.pack`, and a workspace of zeros, which a call leaves zero."""

    tensor: torch.Tensor
    scales: torch.Tensor
    """(K / 128, N) fp16, in Marlin's order."""
    workspace: torch.Tensor
    N: int
    K: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K/2), the shape of the original codes."""
        return self.N, self.K // 2


def pack(b: torch.Tensor, scale: torch.Tensor) -> MarlinWeight:
    """b, (N, K/2) uint8, packed by Marlin's own code with scales of 1; the real scales follow in Marlin's order.

    Raises `ValueError` on sizes that Marlin does not take.
    """
    N, K = b.shape[0], 2 * b.shape[1]
    reason = _why_not(N, K)
    if reason:
        raise ValueError(f"b: {reason}")
    codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1)
    linear = torch.nn.Linear(K, N, bias=False, dtype=torch.half, device=b.device)
    linear.weight.data = codes.half() - SYMMETRIC_ZERO
    marlin: Any = import_module("marlin")
    layer = marlin.Layer(K, N, groupsize=GROUP).to(b.device)
    layer.pack(linear, torch.ones((N, K // GROUP), dtype=torch.half, device=b.device))
    tiles = scale.mT.to(torch.half).reshape(scale.shape[1], -1, SCALE_TILE, SCALE_TILE)
    ordered = tiles.transpose(2, 3).reshape(scale.shape[1], N)
    return MarlinWeight(layer.B, ordered, layer.workspace, N, K)


def _why_not(N: int, K: int) -> str | None:
    for (name, multiple), size in zip(MULTIPLES.items(), (N, K), strict=True):
        if size % multiple or not size:
            return f"Marlin takes {name} in multiples of {multiple}, got {size}"
    return None


def why_not_taken(
    a: torch.Tensor,
    b: torch.Tensor | MarlinWeight,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> str | None:
    """Why Marlin's `Layer` and `mul` cannot take the operands, or None; b may be packed already."""
    if zero is not None:
        return "Marlin has no zero points"
    if bias is not None:
        return "Marlin adds no bias"
    if scale.shape[1] * GROUP != a.shape[1]:
        return f"Marlin takes groups of {GROUP}, got {scale.shape[1]} scales for K={a.shape[1]}"
    if scale.shape[1] == 1:
        return "Marlin reads the scales of a single group in the order of scales of channels"
    return _why_not(b.shape[0], a.shape[1])


def traffic(inputs: Arguments) -> Traffic:
    """Marlin's product reads every operand once; the conversions come in addition."""
    a = inputs.a
    M, (N, half_K) = a.shape[0], inputs.b.shape
    scales, result = 2 * inputs.scale.numel(), 2 * M * N
    return steps(
        (nbytes(a), nbytes(a)), (nbytes(a, inputs.zero, inputs.bias) + N * half_K + scales, result), (result, result)
    )


@register(
    op="gemm_w4a16", name="marlin", role="peer", backend="cuda", min_sm=80, devices=("cuda",), requires=("marlin",),
    prepare=pack, unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b, inputs.scale, inputs.zero, inputs.bias),
    traffic=traffic,
)  # fmt: skip
def gemm_w4a16(
    a: torch.Tensor,
    b: MarlinWeight,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a W with `marlin.mul`.

    a: (M, K) bf16, within fp16's range; b: from `pack`; scale: (N, K / 128); returns (M, N) bf16.  Raises `ValueError`
    on other operands, zero points or a bias.
    """
    if not isinstance(b, MarlinWeight):
        raise ValueError(f"b: expected a weight packed by this kernel's prepare, got {type(b).__name__}")
    M, _, _ = check_all_but_b(a, b.N, scale, zero, bias)
    reason = why_not_taken(a, b, scale, zero, bias)
    if reason:
        raise ValueError(f"{'zero' if zero is not None else 'bias' if bias is not None else 'a'}: {reason}")
    if not M:
        return output(None, (M, b.N), a)
    result = torch.empty((M, b.N), dtype=torch.half, device=a.device)
    marlin: Any = import_module("marlin")
    marlin.mul(a.to(torch.half).contiguous(), b.tensor, result, b.scales, b.workspace)
    return result.to(a.dtype)

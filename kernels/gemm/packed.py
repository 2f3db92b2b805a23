"""Implements `packed`, the version after `library`: the weight is reordered once, at load, for oneDNN's CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooflab.kernels.gemm._operands import traffic
from rooflab.kernels.launcher import kernel
from rooflab.reference.contract import Packed
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import nbytes

# The M for which oneDNN chooses the layout; the result serves every M. 16, 64 and 512 were equally fast at M = 1, 8 and
# 512; 1 was slower in fp32 at each of them, up to 2.3 times. Medians on two cores of an AMD EPYC with AVX-512, torch
# 2.13.0, cold weights, the four products of a SmolLM2-135M layer (in brackets torch.nn.functional.linear): fp32 M=1
# 258 us (831), M=512 7.5 ms (18.2); bf16 M=1 205 us (302), M=512 3.7 ms (3.9). A call costs 10 us more than its work,
# torch.mm's 1 us.
LAYOUT_ROWS = 64


@dataclass(frozen=True)
class PackedWeight(Packed):
    """A weight `[K, N]` in oneDNN's own layout, which other kernels cannot read."""

    nbytes: int
    """The bytes of the weight's elements, without padding that oneDNN may add."""


def pack(b: torch.Tensor) -> PackedWeight:
    """Reorders `b` `[K, N]` for oneDNN.  Raises `ValueError` unless `b` is fp32 or bf16, and on the CPU."""
    if refusal_reason := _why_not(b):
        raise ValueError(refusal_reason)
    check_shape("b", b, None, None)
    packed_tensor = torch.ops.mkldnn._reorder_linear_weight(b.detach().mT.contiguous(), LAYOUT_ROWS)
    return PackedWeight(packed_tensor, tuple(b.shape), b.dtype, nbytes(b))


def _why_not(b: Tensor | PackedWeight) -> str | None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "b: torch was built without oneDNN"
    if 0 in b.shape:
        return f"b: expected elements, because oneDNN packs no empty weight, got shape {tuple(b.shape)}"
    if b.dtype not in (torch.float32, torch.bfloat16):
        return f"b: expected fp32 or bf16, which oneDNN packs here, got {b.dtype}"
    if b.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "b: expected fp32, because oneDNN does not multiply bf16 on this CPU, got bf16"
    return None


@kernel(
    backend="torch",
    devices=("cpu",),
    prepare=pack,
    packed=PackedWeight,
    traffic=traffic,
    unsupported=lambda inputs: _why_not(inputs.b),
)
def packed(a: Tensor, b: PackedWeight, bias: Tensor | None) -> Tensor:
    """Computes `a @ b + bias`.  `b` is a result of `pack`.  oneDNN's function has no argument `out`."""
    linear_result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.tensor, bias, "none", [], "")
    return linear_result

"""The kernel `library` calls torch's matmul with a four-bit weight, `_weight_int4pack_mm`.

On CUDA (tinygemm), `_convert_weight_to_int4pack` packs bytes `[N, K / 2]`.  The *high* half of a byte has the code with
the even k.  On a CPU, `_convert_weight_to_int4pack_for_cpu` packs one code per int32.  A bf16 tensor `[K / group, N,
2]` holds scales and offsets.

A weight is `(code - 8) * scale + offset`.  A zero point becomes `offset = (8 - zero) * scale`, rounded to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.reference.contract import Packed
from rooflab.reference.quantization import INT4_ZERO
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

INNER_K_TILES = 8
"""The number of tiles of 16 along K that are stored together on CUDA: with eight, a thread loads 16 bytes at once."""
SIZE_MULTIPLES = {"N": (8, 16), "K": (16 * INNER_K_TILES, 2)}
"""N and K must be multiples of these numbers: the first on CUDA, the second on a CPU."""
SIZE_RULES = {"G > 0 and K % G == 0 and K // G in (32, 64, 128)": "whole groups of 32, 64 or 128"} | {
    f"{name} % ({on_cuda} if device == 'cuda' else {on_cpu}) == 0 < {name}": (
        f"{name} in multiples of {on_cuda} on CUDA and of {on_cpu} on a CPU, as torch packs it"
    )
    for name, (on_cuda, on_cpu) in SIZE_MULTIPLES.items()
}
"""The conditions that torch (2.11 to 2.13) sets, as its source checks them."""


@dataclass(frozen=True)
class TinygemmWeight(Packed):
    """Holds a weight's codes (N, K/2) in torch's layout for one device, with scales and offsets."""

    pairs: Tensor
    """The scales and offsets, (K / group, N, 2) bf16."""

    @property
    def nbytes(self) -> int:
        """Returns the bytes of codes, scales and offsets."""
        return nbytes(self.tensor, self.pairs)


def pack(b: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> TinygemmWeight:
    """Packs `b` (`[N, K / 2]` uint8), `scale` and `zero` to the layouts that torch needs on the device of `b`.

    Raises `ValueError` if torch cannot pack these sizes."""
    N, K = b.shape[0], 2 * b.shape[1]
    for (name, (cuda_divisor, cpu_divisor)), size in zip(SIZE_MULTIPLES.items(), (N, K), strict=True):
        size_multiple = cuda_divisor if b.is_cuda else cpu_divisor
        if size % size_multiple or not size:
            raise ValueError(f"b: expected {name} in multiples of {size_multiple}, as torch packs it here, got {size}")
    if b.device.type == "cuda":
        swapped_nibbles = (b << 4 | b >> 4).contiguous()
        packed_codes = torch.ops.aten._convert_weight_to_int4pack(swapped_nibbles, INNER_K_TILES)
    else:
        codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1).int()
        packed_codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    bf16_offset = torch.zeros_like(scale) if zero is None else (INT4_ZERO - zero.to(scale.dtype)) * scale
    scales_and_offsets = torch.stack((scale.mT, bf16_offset.mT), dim=-1)
    return TinygemmWeight(packed_codes, (N, K // 2), b.dtype, scales_and_offsets)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of every operand once.  Each scale has one offset, which counts too."""
    a, b = inputs.a, inputs.b
    b_bytes = b.nbytes if isinstance(b, TinygemmWeight) else nbytes(b) + 2 * nbytes(inputs.scale)
    return Traffic(read_bytes=nbytes(a, inputs.bias) + b_bytes, write_bytes=a.shape[0] * b.shape[0] * a.element_size())


@kernel(
    backend="torch",
    prepare=pack,
    packed=TinygemmWeight,
    holds=SIZE_RULES,
    traffic=traffic,
    dtypes={"scale": (torch.bfloat16,)},
    contiguous=("a",),
    off={"bias": "torch has no call that adds a bias before it rounds"},
)
def library(a: Tensor, b: TinygemmWeight, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Tensor:
    """Computes `a @ W`.  `b` is from `pack`: W with its scales and zero points.  torch's function has no `out`."""
    (M, K), N = a.shape, b.shape[0]
    if not M:
        return a.new_empty((M, N))
    aten_ops = torch.ops.aten
    matmul_call = aten_ops._weight_int4pack_mm if a.is_cuda else aten_ops._weight_int4pack_mm_for_cpu
    result: Tensor = matmul_call(a, b.tensor, K // scale.shape[1], b.pairs)
    return result

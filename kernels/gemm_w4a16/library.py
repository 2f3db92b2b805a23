"""torch's product with a four-bit weight: `_weight_int4pack_mm`, whose layout differs between devices.

On CUDA (tinygemm) `_convert_weight_to_int4pack` takes bytes (N, K/2) with the even k in the *high* half and orders them
for mma.m16n8k16; on a CPU `_convert_weight_to_int4pack_for_cpu` takes one code per int32.  Both products take scales
and offsets interleaved, (K/group, N, 2) in bf16, and a weight is (code - 8) scale + offset: a zero point becomes
(8 - zero) scale, rounded to bf16.  `prepare` packs and interleaves, once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.gemm_w4a16._operands import SYMMETRIC_ZERO, check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

INNER_K_TILES = 8
"""Tiles of 16 along K that are stored together on CUDA: with eight a thread loads 16 bytes at a time."""
CUDA_MULTIPLES = {"N": 8, "K": 16 * INNER_K_TILES}
CPU_MULTIPLES = {"N": 16, "K": 2}


@dataclass(frozen=True)
class TinygemmWeight:
    """Codes in torch's layout for one device."""

    tensor: torch.Tensor
    """In a layout known only to torch."""
    pairs: torch.Tensor
    """Scales and offsets, (K / group, N, 2) bf16."""
    N: int
    K: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K/2), the shape of the original codes."""
        return self.N, self.K // 2

    @property
    def device(self) -> torch.device:
        """The device of the packed tensor."""
        return self.tensor.device


def pack(b: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> TinygemmWeight:
    """b, (N, K/2) uint8, with the op's scale and zero, in torch's layouts for its device.

    Raises `ValueError` if torch cannot pack them.
    """
    N, K = b.shape[0], 2 * b.shape[1]
    reason = _why_not(N, K, b.device)
    if reason:
        raise ValueError(f"b: {reason}")
    if b.device.type == "cuda":
        halves_swapped = (b << 4 | b >> 4).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack(halves_swapped, INNER_K_TILES)
    else:
        codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1).int()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    offset = torch.zeros_like(scale) if zero is None else (SYMMETRIC_ZERO - zero.to(scale.dtype)) * scale
    pairs = torch.stack((scale.mT, offset.mT), dim=-1)
    return TinygemmWeight(packed, pairs, N, K, nbytes(packed, pairs))


def _why_not(N: int, K: int, device: torch.device) -> str | None:
    for (name, multiple), size in zip(
        (CUDA_MULTIPLES if device.type == "cuda" else CPU_MULTIPLES).items(), (N, K), strict=True
    ):
        if size % multiple or not size:
            return f"torch packs {name} in multiples of {multiple} on this device, got {size}"
    return None


def why_not_taken(
    a: torch.Tensor, b: torch.Tensor | TinygemmWeight, scale: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """Why torch (2.11 to 2.13) cannot take the operands (its source checks this), or None; b may be packed already."""
    if bias is not None:
        return "torch has no call that adds a bias before it rounds"
    if not a.is_contiguous():
        return "torch takes a contiguous a"
    if scale.dtype != torch.bfloat16:
        return f"torch takes bf16 scales, got {scale.dtype}"
    K, groups = a.shape[1], scale.shape[1]
    if not groups or K % groups or K // groups not in (32, 64, 128):
        return f"torch takes whole groups of 32, 64 or 128, got K={K} in {groups} groups"
    return _why_not(b.shape[0], K, b.device)


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once, and one offset per scale."""
    a, b = inputs.a, inputs.b
    packed = b.nbytes if isinstance(b, TinygemmWeight) else nbytes(b) + 2 * nbytes(inputs.scale)
    return Traffic(read_bytes=nbytes(a, inputs.bias) + packed, write_bytes=a.shape[0] * b.shape[0] * a.element_size())


@register(
    op="gemm_w4a16", name="library", role="library", backend="torch", prepare=pack,
    unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b, inputs.scale, inputs.bias), traffic=traffic,
)  # fmt: skip
def gemm_w4a16(
    a: torch.Tensor,
    b: TinygemmWeight,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a W with `_weight_int4pack_mm`, or `_weight_int4pack_mm_for_cpu`.

    a: (M, K) bf16; b: from `pack`, which contains scale, (N, K / group) bf16, and zero, uint8 of that shape or None for
    8; returns (M, N) bf16; torch's call takes no `out`.  Raises `ValueError` on other operands, and on a bias.
    """
    if not isinstance(b, TinygemmWeight):
        raise ValueError(f"b: expected a weight packed by this kernel's prepare, got {type(b).__name__}")
    M, _, K, _ = check_operands(a, b.tensor.new_empty(b.shape, dtype=torch.uint8, device="meta"), scale, zero, bias)
    reason = why_not_taken(a, b, scale, bias)
    if reason:
        raise ValueError(f"{'bias' if bias is not None else 'a'}: {reason}")
    if not M:
        return output(None, (M, b.N), a)
    product = (
        torch.ops.aten._weight_int4pack_mm if a.is_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
    )  # one name, two operators
    result: torch.Tensor = product(a, b.tensor, K // scale.shape[1], b.pairs)
    return result

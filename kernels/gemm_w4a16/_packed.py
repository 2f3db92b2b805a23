"""The packed form of the codes: as large as the original, made once, at load.

Each 32 codes along K (16 bytes) are four words of eight codes.  Word t holds what lane t of a quad gives to two steps
of an mma of 16 along K, k = 16 s + 8 h + 2 t + e, in its four bits number 2 s + h + 4 e.  So the mask 0x000f000f,
applied to a word shifted by 0, 4, 8 and 12, gives two neighbours in the order of a bf16x2 register; and Triton, which
multiplies from registers in the same layout (`dequant_dot`), moves no code between lanes.  Codes behind K are 0.
"""

from __future__ import annotations

import torch

from rooflab.kernels.gemm_w4a16._operands import check_all_but_b
from rooflab.reference.rules import check_dtype, check_shape

BLOCK_K = 32
WORDS = 4
"""Words per block."""


def pack(b: torch.Tensor) -> torch.Tensor:
    """Codes (N, K/2) uint8 as int32 (N, 4 ceil(K / 32)).  Raises `ValueError` on another dtype or shape."""
    check_shape("b", b, None, None)
    check_dtype("b", b, torch.uint8)
    codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1)
    N, K = codes.shape
    blocks = -(-K // BLOCK_K)
    codes = torch.nn.functional.pad(codes, (0, blocks * BLOCK_K - K)).view(N, blocks, 2, 2, WORDS, 2)  # s, h, t, e
    words = codes.permute(0, 1, 4, 5, 2, 3).reshape(N, blocks * WORDS, 4, 2)
    return (words[..., 0] | words[..., 1] << 4).contiguous().view(torch.int32).view(N, blocks * WORDS)


def check_packed(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[int, int, int, int]:
    """M, N, K and the group.  Raises as `check_operands` does, and if b is not from `pack`."""
    if b.dtype != torch.int32:
        raise ValueError(f"b: expected a weight packed by this kernel's prepare, which is int32, got {b.dtype}")
    N = b.shape[0]
    M, K, group = check_all_but_b(a, N, scale, zero, bias)
    check_shape("b", b, N, -(-K // BLOCK_K) * WORDS)
    if not b.is_contiguous():
        raise ValueError(f"b: expected the contiguous tensor that prepare made, got strides {b.stride()}")
    return M, N, K, group

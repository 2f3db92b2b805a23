"""The packed form of the codes: as large as the original, made once, at load.

Each 32 codes along K (16 bytes) are four words of eight codes.  Word t holds what lane t of a quad gives to two steps
of an mma of 16 along K, k = 16 s + 8 h + 2 t + e, in its four bits number 2 s + h + 4 e.  So the mask 0x000f000f,
applied to a word shifted by 0, 4, 8 and 12, gives two neighbours in the order of a bf16x2 register; and Triton, which
multiplies from registers in the same layout (`dequant_dot`), moves no code between lanes.  Codes behind K are 0.
"""

from __future__ import annotations

import torch

from rooflab.kernels.gemm._operands import why_not_along_k
from rooflab.kernels.lib.stream import MOST_COLUMNS, MOST_M
from rooflab.reference.contract import Argument
from rooflab.reference.gemm_w4a16 import group_size
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import Arguments

BLOCK_K = 32
WORDS = 4
"""Words per block."""
CHUNK_K = 128
"""Values along K that a quad of lanes holds at once."""


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


PACKED = Argument("N W", (torch.int32,), "contiguous", packed=torch.Tensor)
"""What `pack` returns, in a contract."""


def subgroups(group: int) -> int:
    """Groups that a quad holds at once."""
    return CHUNK_K // group


def unsupported(inputs: Arguments, few_rows: bool = False) -> str | None:
    """Why a kernel refuses packed codes for another K, layouts that it does not read, or more than `few_rows`."""
    b, scale, zero, (M, K) = inputs.b, inputs.scale, inputs.zero, inputs.a.shape
    if few_rows:
        most = min(MOST_M, MOST_COLUMNS // subgroups(group_size(K, scale.shape[1]) if K else CHUNK_K))
        if most < M:
            return f"a: expected up to {most} rows in groups of this size, got {M}; gemm_w4a16/dequant_dot takes more"
    words = -(-K // BLOCK_K) * WORDS
    if b.dtype == torch.int32 and b.shape[1] != words:
        return f"b: expected shape ({b.shape[0]}, {words}), got {tuple(b.shape)}"
    for name, x in (("scale", scale), ("zero", zero)):
        if x is not None and x.shape[1] > 1 and x.stride(1) != 1:
            return f"{name}: expected stride 1 along groups, got strides {x.stride()}; gemm_w4a16/naive takes any"
    if zero is not None and zero.shape[0] > 1 and zero.stride(0) != scale.stride(0):
        return f"zero: expected the strides of scale, got {zero.stride()}; gemm_w4a16/naive takes any"
    return why_not_along_k(inputs, "gemm_w4a16/naive", ("a",))

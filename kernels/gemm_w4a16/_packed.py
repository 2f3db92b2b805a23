"""Packs the codes of a four-bit weight once, at load.  Packing changes the order of the codes, and pads K to a multiple
of 32 with zeros.

Four lanes of a warp multiply 32 neighbouring codes along K, with two mma instructions.  Each lane t (0 to 3) has one
32-bit word with eight of these codes.  A word has eight fields of 4 bits.  The position of a field gives the code k
that it holds:

    field = 2 * s + h + 4 * e
    k = 16 * s + 8 * h + 2 * t + e    (s, h and e are 0 or 1)

A shift and the mask 0x000f000f give two codes with neighbouring k, in the order of a bf16x2 register.
"""

from __future__ import annotations

import torch

from rooflab.kernels.gemm._operands import along_k
from rooflab.reference.contract import Argument
from rooflab.reference.rules import check_dtype, check_shape

BLOCK_K = 32
CHUNK_WORDS = 4
"""The number of 32-bit words for each 32 codes along K."""
CHUNK_K = 128
"""The number of values along K that a quad of lanes holds at once."""


def pack(b: torch.Tensor) -> torch.Tensor:
    """Packs codes `[N, K / 2]` uint8 to int32 `[N, 4 * ceil(K / 32)]`.  Other dtypes or shapes raise `ValueError`."""
    check_shape("b", b, None, None)
    check_dtype("b", b, torch.uint8)
    codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1)
    N, K = codes.shape
    k_blocks = -(-K // BLOCK_K)
    codes = torch.nn.functional.pad(codes, (0, k_blocks * BLOCK_K - K)).view(
        N, k_blocks, 2, 2, CHUNK_WORDS, 2
    )  # s, h, t, e
    word_codes = codes.permute(0, 1, 4, 5, 2, 3).reshape(N, k_blocks * CHUNK_WORDS, 4, 2)
    return (word_codes[..., 0] | word_codes[..., 1] << 4).contiguous().view(torch.int32).view(N, k_blocks * CHUNK_WORDS)


PACKED_ARGUMENT = Argument(f"N {CHUNK_WORDS}K/{BLOCK_K}", (torch.int32,), "contiguous", packed=torch.Tensor)
"""The result of `pack`, described as an argument of a contract."""
CONDITIONS = {
    "scale[1] == 1 or G <= 1": "stride 1 along groups",
    "zero is None or zero[1] == 1 or G <= 1": "stride 1 along groups",
    "zero is None or zero[0] == scale[0] or N == 1": "the strides of scale",
    **along_k("a"),
}
"""The `holds` of the kernels that take the packed codes."""


def subgroups(group: int) -> int:
    """Returns the number of groups in 64 bytes of codes, which four lanes load at once.  `group`: codes per scale."""
    return CHUNK_K // group

"""Packs the codes of an eight-bit weight once, at load.  The packed codes have the same size.

A chunk holds 16 codes along K, or four 32-bit words.  Four lanes multiply a chunk in one mma instruction.  Lane t needs
word t.

Each number h and e is 0 or 1.  Byte `h + 2 * e` of word t has the code at `k = 8 * h + 2 * t + e`.  So one shift and
the mask 0x00ff00ff give two codes with neighbouring k, in the order of a bf16x2 register.  Codes past K are 0.
"""

from __future__ import annotations

import torch

from rooflab.reference.contract import Argument
from rooflab.reference.rules import check_dtype, check_shape

BLOCK_K = 16
CHUNK_WORDS = 4
"""The number of 32-bit words for each 16 codes along K."""


def pack(b: torch.Tensor) -> torch.Tensor:
    """Packs codes `[K, N]` int8 to int32 `[N, 4 * ceil(K / 16)]`.  Raises `ValueError` on another dtype or shape."""
    check_shape("b", b, None, None)
    check_dtype("b", b, torch.int8)
    K, N = b.shape
    k_blocks = -(-K // BLOCK_K)
    codes = torch.nn.functional.pad(b.mT, (0, k_blocks * BLOCK_K - K)).view(N, k_blocks, 2, CHUNK_WORDS, 2)  # h, t, e
    word_codes = codes.permute(0, 1, 3, 4, 2).reshape(N, k_blocks * CHUNK_WORDS, 4)
    return word_codes.contiguous().view(torch.int32).view(N, k_blocks * CHUNK_WORDS)


PACKED_ARGUMENT = Argument(f"N {CHUNK_WORDS}K/{BLOCK_K}", (torch.int32,), "contiguous", packed=torch.Tensor)
"""The result of `pack`, described as an argument of a contract."""

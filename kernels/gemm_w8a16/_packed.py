"""Packs the codes of an eight-bit weight once, at load.  Packing changes the order of the codes, and pads K to a
multiple of 16 with zeros.

Four lanes of a warp multiply 16 neighbouring codes along K, with one mma instruction.  Each lane t (0 to 3) has one
32-bit word with four of these codes.  The position of a byte in the word gives the code k that it holds:

    byte = h + 2 * e
    k = 8 * h + 2 * t + e    (h and e are 0 or 1)

One shift and the mask 0x00ff00ff give two codes with neighbouring k, in the order of a bf16x2 register.
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

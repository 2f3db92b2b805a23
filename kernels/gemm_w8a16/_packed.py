"""Packs the codes of an eight-bit weight once, at load.  Packing does not change the size of the codes.

A chunk is 16 codes along K: 16 bytes, in four 32-bit words of four codes.  A quad (four lanes) multiplies a chunk in
one step of an mma with 16 values along K.  Lane t of the quad needs word t.

The numbers h and e are 0 or 1.  Word t has the code at `k = 8 * h + 2 * t + e` in its byte `h + 2 * e`.  A kernel
applies the mask 0x00ff00ff to a word, and to the word shifted by 8 bits.  Each result is two codes with neighbouring k,
in the order of a bf16x2 register.  `dequant_dot` needs the same order in registers, so it moves no code between lanes.
Codes past K are 0.
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

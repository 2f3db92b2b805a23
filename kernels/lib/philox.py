"""Computes the random words (Philox-4x32-10) and the exponential random numbers of `sample`, by torch calls.

torch has no unsigned multiplication, so int64 holds the 32-bit words.  A multiplication wraps modulo 2**64, which keeps
the needed bits.  A mask cuts the result of an arithmetic shift to 32 bits.
"""

from __future__ import annotations

import torch

MASK_32 = 0xFFFFFFFF
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85


def philox(
    seed: torch.Tensor, position: torch.Tensor, block: torch.Tensor, stream: torch.Tensor | int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns Philox's four random words, int64 tensors with values in [0, 2**32).

    The key is `seed`, and the counter is `(position, block, stream, 0)`.  The arguments are int64 tensors that
    broadcast to one shape, which the words have."""
    k0, k1 = seed & MASK_32, (seed >> 32) & MASK_32
    c0 = (position & MASK_32) + 0 * (seed + block)  # of the full shape
    shape = c0.shape
    c1 = block.expand(shape)
    c2 = (stream if isinstance(stream, torch.Tensor) else block.new_full((), stream)).expand(shape)
    c3 = block.new_zeros(()).expand(shape)
    for _ in range(10):
        first_product, second_product = c0 * M0, c2 * M1
        c0 = (second_product >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK_32)
        c2 = (first_product >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK_32)
        c1, c3 = second_product.bitwise_and_(MASK_32), first_product.bitwise_and_(MASK_32)
        k0, k1 = (k0 + W0) & MASK_32, (k1 + W1) & MASK_32
    return c0, c1, c2, c3


def words_of_rows(seed: torch.Tensor, position: torch.Tensor, V: int, stream: torch.Tensor | int = 0) -> torch.Tensor:
    """Returns `V` random words for each of B rows, (B, V).  `seed`, `position` and `stream` have one value per row."""
    token_blocks = torch.arange(-(-V // 4), device=seed.device)
    row_streams = stream[:, None] if isinstance(stream, torch.Tensor) else stream
    return torch.stack(philox(seed[:, None], position[:, None], token_blocks, row_streams), dim=-1).flatten(1)[:, :V]


def words_of_tokens(seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Returns the random words (N,) of N tokens.  Each token has its own seed and position."""
    random_words = torch.stack(philox(seed, position, token >> 2), dim=-1)
    return random_words.gather(-1, (token & 3)[:, None]).squeeze(-1)


def log_exponential(word: torch.Tensor) -> torch.Tensor:
    """Returns `log(E)` of each word x in fp32: `E = -log1p(-u)`, `u = min(fp32(x) * 2**-32 + 2**-33, 1 - 2**-24)`."""
    uniform_draw = word.float().mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return uniform_draw.neg_().log1p_().neg_().log_()

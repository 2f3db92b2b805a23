"""Philox-4x32-10 and the exponential race in torch steps.

torch has no unsigned multiply, so int64 holds the 32-bit words: products wrap modulo 2**64 with the right bits, and a
mask cuts the result of an arithmetic shift to 32 bits.
"""

from __future__ import annotations

import torch

LOW = 0xFFFFFFFF
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85


def first_word(seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Philox's first word for key = seed and counter = (position, token, 0, 0), int64 in [0, 2**32).

    The three int64 tensors broadcast.
    """
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    c0, c1 = position & LOW, token
    c2 = c3 = torch.zeros((), dtype=torch.int64, device=token.device)
    for _ in range(10):
        first, second = c0 * M0, c2 * M1
        c0, c1 = ((second >> 32) & LOW) ^ c1 ^ k0, second & LOW
        c2, c3 = ((first >> 32) & LOW) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return c0


def log_exponential(word: torch.Tensor) -> torch.Tensor:
    """log E for each first word, fp32: E = -log1p(-u), u = min(fp32(x) * 2**-32 + 2**-33, 1 - 2**-24)."""
    u = word.float().mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_()


def first_word_of_row(seed: int, position: int, token: torch.Tensor) -> torch.Tensor:
    """`first_word` for one row, in place; scalar words stay Python integers.

    Only the token varies: after one round one word depends on it, after two rounds two, after four rounds all four.
    The last round computes only one word.  Words that are not multiplied keep their upper halves until the mask.
    """
    keys = [((seed + i * W0) & LOW, ((seed >> 32) + i * W1) & LOW) for i in range(10)]
    first_scalar = (position & LOW) * M0
    c0 = token ^ keys[0][0]
    second_scalar = ((first_scalar >> 32) ^ keys[0][1]) * M1
    first = c0 * M0
    c2 = ((first >> 32) & LOW) ^ ((first_scalar & LOW) ^ keys[1][1])
    first_scalar = ((second_scalar >> 32) ^ keys[1][0]) * M0
    c1 = c2 * M1
    torch.bitwise_right_shift(c1, 32, out=c0)
    c0.bitwise_xor_((second_scalar & LOW) ^ keys[2][0]).bitwise_and_(LOW)
    torch.bitwise_xor(first, (first_scalar >> 32) ^ keys[2][1], out=c2)
    c2.bitwise_and_(LOW)
    c3 = first.fill_(first_scalar & LOW)
    first, second = torch.empty_like(c0), torch.empty_like(c0)
    for k0, k1 in keys[3:9]:
        torch.mul(c0, M0, out=first)
        torch.mul(c2, M1, out=second)
        torch.bitwise_right_shift(second, 32, out=c0)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(LOW)
        torch.bitwise_right_shift(first, 32, out=c2)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(LOW)
        c1, second, c3, first = second, c1, first, c3
    torch.mul(c2, M1, out=c0)
    return c0.bitwise_right_shift_(32).bitwise_xor_(c1).bitwise_xor_(keys[9][0]).bitwise_and_(LOW)

"""Philox-4x32-10 and the exponential race in torch steps.

torch has no unsigned multiply: 32-bit words are held in int64, whose products wrap modulo 2**64 with the right bits, and
an arithmetic shift is masked back to 32 bits.
"""

from __future__ import annotations

import torch

LOW = 0xFFFFFFFF
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85


def first_word(seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Philox's first word at key = seed and counter = (position, token, 0, 0), int64 in [0, 2**32).

    The three int64 tensors broadcast against one another.
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
    """log E of each first word, fp32: E = -log1p(-u), u = min(fp32(x) * 2**-32 + 2**-33, 1 - 2**-24)."""
    u = word.float().mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_()

"""Computes random numbers from a key and a counter, and from these the exponential noise of `sample`.

The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is the
seed. The counter is (position, token id // 4, stream, 0). Each counter gives the words of four tokens.
"""

from __future__ import annotations

import numpy as np
import torch


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns the Philox-4x32-10 words (..., 4) for counter (..., 4) and key (..., 2): 32-bit words in uint64."""
    mask32 = np.uint64(0xFFFFFFFF)
    word_bits = np.uint64(32)
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(10):
        prod0, prod1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (prod1 >> word_bits) ^ c1 ^ k0, prod1 & mask32, (prod0 >> word_bits) ^ c3 ^ k1, prod0 & mask32
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask32, (k1 + np.uint64(0xBB67AE85)) & mask32
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


def race(seed: int, position: int, vocab_size: int, stream: int = 0) -> torch.Tensor:
    """Returns log E of every token, (V,) fp64. E is the exponential noise with which `sample` draws a token.

    E = -log1p(-u), with u = min(fp32(x) * 2**-32 + 2**-33, 1 - 2**-24) in fp32. x is the token's random word."""
    word_groups = -(-vocab_size // 4)
    counter = np.zeros((word_groups, 4), dtype=np.uint64)
    counter[:, 0] = position & 0xFFFFFFFF
    counter[:, 1] = np.arange(word_groups, dtype=np.uint64)
    counter[:, 2] = stream
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint64)
    x = philox(counter, key).reshape(-1)[:vocab_size].astype(np.uint32).astype(np.float32)
    uniforms = np.minimum(x * np.float32(2.0**-32) + np.float32(2.0**-33), np.float32(1 - 2.0**-24)).astype(np.float64)
    return torch.from_numpy(np.log(-np.log1p(-uniforms)))

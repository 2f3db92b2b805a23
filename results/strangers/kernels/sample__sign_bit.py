"""WRONG.  A token is allowed if `word & (1 << bit)` is above 0.  For bit 31 of an int32 the result is negative, so
every 32nd token (31, 63, 95) is never allowed.  Without a mask nothing is wrong, and with one it matters as soon as
the grammar's next token is one of these."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register
from rooflab.reference.philox import race


@triton.jit
def mask_logits(logits, allowed, out, l_b, V, words, MASK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * l_b + at, at < V, float("-inf")).to(tl.float32)
    if MASK:
        word = tl.load(allowed + row * words + at // 32, at < V, 0)
        bit = tl.full((BLOCK,), 1, tl.int32) << (at % 32)
        value = tl.where((word & bit) > 0, value, float("-inf"))
    tl.store(out + row * V + at, value, at < V)


@register(op="sample", name="sign_bit", role="optimized", backend="triton")
def sample(logits, temperature, top_k, top_p, min_p, seed, position, *, allowed=None):
    B, V = logits.shape
    rows = torch.empty((B, V), dtype=torch.float32, device=logits.device)
    if B:
        words = triton.cdiv(V, 32)
        mask_logits[(B, triton.cdiv(V, 256))](
            logits,
            logits if allowed is None else allowed,
            rows,
            logits.stride(0),
            V,
            words,
            MASK=allowed is not None,
            BLOCK=256,
        )
    tokens = []
    for b, row in enumerate(rows.double()):
        if temperature[b] == 0:
            tokens.append(int(row.argmax()))
            continue
        ordered, ids = torch.sort(row / temperature[b].double(), descending=True, stable=True)
        ordered[int(top_k[b]) or V :] = float("-inf")
        probs = torch.softmax(ordered, 0)
        if top_p[b] < 1:
            ordered[(probs.cumsum(0) - probs) >= top_p[b].double()] = float("-inf")
        if min_p[b] > 0:
            ordered[torch.exp(ordered - ordered[0]) < min_p[b].double()] = float("-inf")
        noise = race(int(seed[b]), int(position[b]), V)[ids]
        tokens.append(int(ids[(ordered - noise).argmax()]))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)

"""WRONG.  The probabilities of all K draft tokens are gathered at once, also of those behind num_drafts.  These are
padding, and a server fills them with -1.  Their index is outside the vocabulary, and the gather raises an
exception."""

import numpy as np
import torch

from rooflab.kernels.registry import register
from rooflab.reference.philox import philox, race


def uniforms(seed, position, count):
    counter = np.zeros((count, 4), dtype=np.uint64)
    counter[:, 0] = [(position + i) & 0xFFFFFFFF for i in range(count)]
    counter[:, 2] = 1
    x = philox(counter, np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint64))[:, 0]
    u = np.minimum(x.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33), np.float32(1 - 2.0**-24))
    return torch.from_numpy(u.astype(np.float64))


@register(op="speculative_verify", name="padded_drafts", role="optimized", backend="torch")
def speculative_verify(draft_tokens, target_probs, num_drafts, seed, position, *, draft_probs=None):
    (B, K), V = draft_tokens.shape, target_probs.shape[2]
    p = target_probs[:, :K].gather(2, draft_tokens[..., None])[..., 0].double()
    q = torch.ones_like(p)
    if draft_probs is not None:
        q = draft_probs.gather(2, draft_tokens[..., None])[..., 0].double()
    tokens = torch.full((B, K + 1), -1, dtype=torch.int64)
    accepted = torch.zeros(B, dtype=torch.int32)
    for b, (count, s, n) in enumerate(zip(num_drafts.tolist(), seed.tolist(), position.tolist(), strict=True)):
        passed = (uniforms(s, n, K) * q[b] < p[b])[:count]
        i = int(passed.int().cumprod(0).sum())
        tokens[b, :i], accepted[b] = draft_tokens[b, :i], i
        law = target_probs[b, i].double()
        if i < count:
            other = draft_probs[b, i].double() if draft_probs is not None else torch.zeros(V, dtype=torch.float64)
            if draft_probs is None:
                other[draft_tokens[b, i]] = 1.0
            left = (law - other).clamp(min=0)
            law = left if bool(left.any()) else law
        tokens[b, i] = (law.log() - race(s, n + i, V, 2 if i < count else 0)).argmax()
    return tokens, accepted

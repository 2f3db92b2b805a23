"""WRONG.  After a rejection the next token is drawn from max(p - q, 0), also if nothing is left of it.  With laws
that each sum to 1 something is left, except by rounding.  Where the target's row is a scaled copy of the draft's
(weights that are not normalised), all scores are -inf, and token 0 comes out, whatever its probability is."""

import numpy as np
import torch

from rooflab.kernels.registry import register
from rooflab.reference.philox import philox, race


@register(op="speculative_verify", name="nothing_left", role="optimized", backend="torch")
def speculative_verify(draft_tokens, target_probs, num_drafts, seed, position, *, draft_probs=None):
    (B, K), V = draft_tokens.shape, target_probs.shape[2]
    tokens = np.full((B, K + 1), -1, dtype=np.int64)
    accepted = np.zeros(B, dtype=np.int32)
    p = target_probs.double().numpy()
    for b in range(B):
        s, n, count = int(seed[b]), int(position[b]), int(num_drafts[b])
        key = np.array([s & 0xFFFFFFFF, (s >> 32) & 0xFFFFFFFF], dtype=np.uint64)
        weights, stream = p[b, count], 0
        for i in range(count):
            x = int(draft_tokens[b, i])
            q = np.eye(1, V, x)[0] if draft_probs is None else draft_probs[b, i].double().numpy()
            word = philox(np.array([(n + i) & 0xFFFFFFFF, 0, 1, 0], dtype=np.uint64), key)[0]
            u = np.float32(word.astype(np.uint32)) * np.float32(2.0**-32) + np.float32(2.0**-33)
            if not float(min(u, np.float32(1 - 2.0**-24))) * q[x] < p[b, i, x]:
                weights, stream = np.maximum(p[b, i] - q, 0.0), 2
                break
            tokens[b, i] = x
            accepted[b] += 1
        with np.errstate(divide="ignore"):
            scores = np.log(weights) - race(s, n + int(accepted[b]), V, stream).numpy()
        tokens[b, accepted[b]] = scores.argmax()
    return torch.from_numpy(tokens), torch.from_numpy(accepted)

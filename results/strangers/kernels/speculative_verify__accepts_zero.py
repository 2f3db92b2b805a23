"""WRONG.  A draft is accepted if u q <= p, with an equal sign.  If q and p of a draft token are both 0, 0 <= 0
accepts a token that the target never gives.  That happens when the target's top_p or a grammar took the token away,
and the draft's reported probability was rounded to 0.  For probabilities above 0 the sign changes nothing."""

import numpy as np
import torch

from rooflab.kernels.registry import register
from rooflab.reference.philox import philox, race


def uniform(seed, position):
    counter = np.array([position & 0xFFFFFFFF, 0, 1, 0], dtype=np.uint64)
    word = philox(counter, np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint64))[0]
    u = word.astype(np.uint32).astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return float(min(u, np.float32(1 - 2.0**-24)))


@register(op="speculative_verify", name="accepts_zero", role="optimized", backend="torch")
def speculative_verify(draft_tokens, target_probs, num_drafts, seed, position, *, draft_probs=None):
    (B, K), V = draft_tokens.shape, target_probs.shape[2]
    tokens = torch.full((B, K + 1), -1, dtype=torch.int64)
    accepted = torch.zeros(B, dtype=torch.int32)
    for b in range(B):
        s, n, count = int(seed[b]), int(position[b]), int(num_drafts[b])
        laws = target_probs[b].double()
        i, stream = 0, 0
        while i < count:
            x = int(draft_tokens[b, i])
            q = torch.zeros(V, dtype=torch.float64)
            q[x] = 1.0
            q = q if draft_probs is None else draft_probs[b, i].double()
            if not uniform(s, n + i) * float(q[x]) <= float(laws[i, x]):
                left = (laws[i] - q).clamp(min=0)
                laws[i] = left if bool(left.any()) else laws[i]
                stream = 2
                break
            tokens[b, i] = x
            i += 1
        tokens[b, i] = int((laws[i].log() - race(s, n + i, V, stream)).argmax())
        accepted[b] = i
    return tokens, accepted

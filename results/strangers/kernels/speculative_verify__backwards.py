"""RIGHT.  The drafts of all rows are looked at from the last to the first: each one that fails sets the row's
number of accepted tokens back to its own place, so that the first failure is left at the end.  Then one more draw a
row.  Only drafts that count are looked up."""

import numpy as np
import torch

from rooflab.kernels.registry import register
from rooflab.reference.philox import philox, race

LOW = np.uint64(0xFFFFFFFF)


def uniforms(seeds, positions):
    zero = np.zeros(len(seeds), dtype=np.uint64)
    counter = np.stack((positions.astype(np.uint64) & LOW, zero, zero + np.uint64(1), zero), axis=-1)
    wide = seeds.astype(np.uint64)
    words = philox(counter, np.stack((wide & LOW, wide >> np.uint64(32)), axis=-1))[:, 0]
    u = words.astype(np.uint32).astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return np.minimum(u, np.float32(1 - 2.0**-24)).astype(np.float64)


@register(op="speculative_verify", name="backwards", role="optimized", backend="torch")
def speculative_verify(draft_tokens, target_probs, num_drafts, seed, position, *, draft_probs=None):
    (B, K), V, place = draft_tokens.shape, target_probs.shape[2], draft_tokens.device
    drafts, counts, seeds, positions = (x.cpu().numpy() for x in (draft_tokens, num_drafts, seed, position))
    p = target_probs.cpu().double().numpy()
    q = None if draft_probs is None else draft_probs.cpu().double().numpy()
    accepted = counts.astype(np.int64)
    for i in reversed(range(K)):
        rows = np.flatnonzero(counts > i)
        x = drafts[rows, i]
        theirs = np.ones(len(rows)) if q is None else q[rows, i, x]
        failed = ~(uniforms(seeds[rows], positions[rows] + i) * theirs < p[rows, i, x])
        accepted[rows[failed]] = i
    tokens = np.full((B, K + 1), -1, dtype=np.int64)
    for b in range(B):
        i = int(accepted[b])
        tokens[b, :i] = drafts[b, :i]
        law, replaced = p[b, i], i < counts[b]
        if replaced:
            other = np.eye(1, V, drafts[b, i])[0] if q is None else q[b, i]
            left = np.maximum(law - other, 0.0)
            law = left if left.any() else law
        with np.errstate(divide="ignore"):
            logs = np.log(law)
        noise = race(int(seeds[b]), int(positions[b]) + i, V, 2 if replaced else 0).numpy()
        tokens[b, i] = (logs - noise).argmax()
    return torch.from_numpy(tokens).to(place), torch.from_numpy(accepted.astype(np.int32)).to(place)

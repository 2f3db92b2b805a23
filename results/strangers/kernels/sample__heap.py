"""RIGHT.  The candidates of a row come one after another from a heap, the best first and equal ones by index, until
top_k, top_p or min_p ends the list.  Each candidate's score in the race is compared at once, so nothing is kept but
the best one.  Before top_p, a heap of its own counts the weight of the first top_k.  Edits of logits are not taken.
"""

import heapq
import math

import torch

from rooflab.kernels.registry import register
from rooflab.reference.philox import race


def draw(scores, top_k, top_p, min_p, noise):
    finite = [(-score, token) for token, score in enumerate(scores) if score > -math.inf]
    count = min(top_k or len(finite), len(finite))
    candidates = heapq.nsmallest(count, finite) if count < len(finite) else sorted(finite)
    best = -candidates[0][0]
    whole = math.fsum(math.exp(-score - best) for score, _ in candidates)
    heapq.heapify(candidates)
    before, winner = 0.0, (-math.inf, -1)
    while candidates:
        score, token = heapq.heappop(candidates)
        weight = math.exp(-score - best)
        if (top_p < 1 and before / whole >= top_p) or weight < min_p:
            break
        winner = max(winner, (-score - noise[token], token), key=lambda found: found[0])
        before += weight
    return winner[1]


@register(op="sample", name="heap", role="optimized", backend="torch")
def sample(logits, temperature, top_k, top_p, min_p, seed, position):
    tokens = []
    settings = zip(*(x.tolist() for x in (temperature, top_k, top_p, min_p, seed, position)), strict=True)
    for row, (t, k, p, m, s, n) in zip(logits.double(), settings, strict=True):
        if t == 0:
            tokens.append(int(row.argmax()))
        else:
            tokens.append(draw((row / t).tolist(), k, p, m, race(s, n, len(row)).tolist()))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)

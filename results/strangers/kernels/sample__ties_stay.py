"""WRONG.  top_k keeps all tokens whose logit is at least the k-th largest.  If several tokens have that same logit,
more than k are kept, where the spec keeps those with the lowest index.  Logits in fp32 rarely tie; those of bf16 or
fp16, or of a model with equal rows in its head, do."""

import torch

from rooflab.kernels.registry import register
from rooflab.reference.philox import race


@register(op="sample", name="ties_stay", role="optimized", backend="torch")
def sample(logits, temperature, top_k, top_p, min_p, seed, position):
    V = logits.shape[1]
    tokens = []
    for b, row in enumerate(logits.double()):
        if temperature[b] == 0:
            tokens.append(int(row.argmax()))
            continue
        scores = row / temperature[b].double()
        k = min(int(top_k[b]) or V, V)
        scores = scores.masked_fill(scores < scores.topk(k).values[-1], float("-inf"))
        ordered, ids = torch.sort(scores, descending=True, stable=True)
        probs = torch.softmax(ordered, 0)
        if top_p[b] < 1:
            ordered = ordered.masked_fill(probs.cumsum(0) - probs >= top_p[b].double(), float("-inf"))
        if min_p[b] > 0:
            ordered = ordered.masked_fill(torch.exp(ordered - ordered[0]) < min_p[b].double(), float("-inf"))
        kept = torch.full_like(scores, float("-inf")).scatter(0, ids, ordered)
        tokens.append(int((kept - race(int(seed[b]), int(position[b]), V)).argmax()))
    return torch.tensor(tokens, dtype=torch.int64)

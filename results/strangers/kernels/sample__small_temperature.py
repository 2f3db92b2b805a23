"""WRONG.  A temperature of 0 is replaced by 0.0001, so that greedy rows need no path of their own.  If the best
logit is well above the second one, the best token is drawn.  If two logits differ by less than about 0.001
(neighbours in bf16 at small size, and ties), the draw often takes the lower one, or not the first of the equal
ones."""

import torch

from rooflab.kernels.registry import register
from rooflab.reference.philox import race


@register(op="sample", name="small_temperature", role="optimized", backend="torch")
def sample(logits, temperature, top_k, top_p, min_p, seed, position):
    V = logits.shape[1]
    scores = logits.double() / temperature.double().clamp(min=1e-4)[:, None]
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    place = torch.arange(V)
    most = torch.where(top_k == 0, V, top_k)[:, None]
    ordered = ordered.masked_fill(place >= most, float("-inf"))
    probs = torch.softmax(ordered, dim=-1)
    before = probs.cumsum(-1) - probs
    limit = top_p.double()[:, None]
    ordered = ordered.masked_fill((before >= limit) & (limit < 1), float("-inf"))
    ordered = ordered.masked_fill(torch.exp(ordered - ordered[:, :1]) < min_p.double()[:, None], float("-inf"))
    kept = torch.full_like(scores, float("-inf")).scatter(1, ids, ordered)
    noise = torch.stack([race(s, n, V) for s, n in zip(seed.tolist(), position.tolist(), strict=True)])
    return (kept - noise).argmax(dim=-1)

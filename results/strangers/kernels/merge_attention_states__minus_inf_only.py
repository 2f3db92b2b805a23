"""WRONG.  A part without keys is known by its log-sum-exp of -inf.  FlashAttention-2 writes +inf for such a
part.  Then its weight is NaN, and so is the merged row."""

import math

import torch

from rooflab.kernels.registry import register


@register(op="merge_attention_states", name="minus_inf_only", role="optimized", backend="torch")
def merge_attention_states(outs, lses):
    peak = lses.amax(dim=0)
    shift = torch.where(peak == -math.inf, torch.zeros_like(peak), peak)
    weights = torch.exp(lses - shift)
    total = weights.sum(dim=0)
    kept = outs.float().masked_fill((lses == -math.inf)[..., None], 0.0)
    merged = (weights[..., None] * kept).sum(dim=0) / torch.where(total == 0, 1.0, total)[..., None]
    return merged.to(outs.dtype), shift + torch.log(total)

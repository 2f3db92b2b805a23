"""WRONG.  Each row is cut into chunks of 64 columns, and the chunks' means and variances are merged with equal
weights.  The widths of usual models are multiples of 64.  With another width (H = 100, or 1000) the last chunk is
shorter but counts as much as a whole one, so mean and variance are off."""

import torch

from rooflab.kernels.registry import register

CHUNK = 64


@register(op="layernorm", name="equal_chunks", role="optimized", backend="torch")
def layernorm(x, weight, bias=None, eps=1e-5):
    x32 = x.float()
    chunks = x32.split(CHUNK, dim=-1)
    means = torch.stack([chunk.mean(dim=-1) for chunk in chunks], dim=-1)
    variances = torch.stack([chunk.var(dim=-1, unbiased=False) for chunk in chunks], dim=-1)
    mean = means.mean(dim=-1, keepdim=True)
    variance = (variances + (means - mean).square()).mean(dim=-1, keepdim=True)
    out = (x32 - mean) * (variance + eps).rsqrt() * weight.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)

"""WRONG.  `softmax_scale or D**-0.5` takes the default for None, and also for 0.0.  A scale of 0 is allowed: it
averages the values that a query sees (a head that is switched off, an ablation).  The kernel gives a usual softmax
instead."""

import torch

from rooflab.kernels.registry import register


@register(op="flash_attention", name="or_default", role="optimized", backend="torch")
def flash_attention(q, k, v, causal=False, softmax_scale=None, *, window=None, return_lse=False):
    (_, T, H, D), (_, S, H_kv, _) = q.shape, k.shape
    scale = softmax_scale or D**-0.5
    rows = q.double().unflatten(2, (H_kv, H // H_kv))
    scores = torch.einsum("btkgd,bskd->bkgts", rows, k.double()) * scale
    if causal:
        newest = torch.arange(T, device=q.device)[:, None] + S - T
        key = torch.arange(S, device=q.device)
        hidden = key > newest
        if window is not None:
            hidden = hidden | (key <= newest - window)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    out = torch.einsum("bkgts,bskd->btkgd", weights, v.double()).flatten(2, 3)
    out = out.to(torch.bfloat16 if q.element_size() == 1 else q.dtype)
    return (out, lse.flatten(1, 2).mT.float().contiguous()) if return_lse else out

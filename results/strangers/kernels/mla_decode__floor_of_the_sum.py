"""WRONG.  To keep the logarithm finite, the sum of exponentials is held above 1e-30.  The output of an empty
sequence is 0 as it must be.  But its log-sum-exp is about -69 and not -inf, so that a merge with another part,
whose scores are lower than that, gives the empty part all the weight."""

import torch

from rooflab.kernels.registry import register


@register(op="mla_decode", name="floor_of_the_sum", role="optimized", backend="torch")
def mla_decode(q, kv_cache, block_table, seq_lens, latent_dim, softmax_scale, *, return_lse=False):
    (B, H, _), size = q.shape, kv_cache.shape[1]
    longest = max(seq_lens.tolist(), default=0)
    at = torch.arange(longest, device=q.device)
    live = at < seq_lens[:, None]
    pages = torch.where(live, block_table.long()[:, at // size], 0)
    kv = kv_cache[pages, at % size].float().masked_fill(~live[..., None], 0.0)
    scores = torch.einsum("bhd,bsd->bhs", q.float() * softmax_scale, kv)
    scores = scores.masked_fill(~live[:, None], float("-inf"))
    peak = scores.amax(-1) if longest else scores.new_full((B, H), float("-inf"))
    peak = peak.nan_to_num(neginf=0.0)
    weights = torch.exp(scores - peak[..., None])
    total = weights.sum(-1).clamp(min=1e-30)
    out = (torch.einsum("bhs,bsd->bhd", weights, kv[..., :latent_dim]) / total[..., None]).to(q.dtype)
    return (out, peak + torch.log(total)) if return_lse else out

"""WRONG.  The soft cap's tanh(x) is (e^2x - 1) / (e^2x + 1), for want of a tanh in the language.  For a score of
more than 44 times the cap (scores in the thousands and a cap of 20 or 50, as in Gemma 2) e^2x is infinite and the
row is NaN."""

import torch

from rooflab.kernels.registry import register


def capped(scores, cap):
    power = torch.exp(2.0 * (scores / cap))
    return cap * ((power - 1.0) / (power + 1.0))


@register(op="flash_attention", name="tanh_by_exp", role="optimized", backend="torch")
def flash_attention(
    q,
    k,
    v,
    causal=False,
    softmax_scale=None,
    *,
    window=None,
    softcap=None,
    sinks=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    return_lse=False,
):
    (B, T, H, D), (_, S, H_kv, _) = q.shape, k.shape
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        gap = torch.arange(T, device=q.device)[:, None] + S - T - torch.arange(S, device=q.device)
        seen = (gap >= 0) & (gap < (S + T if window is None else window))
    out = torch.zeros(B, T, H, D, device=q.device)
    lse = torch.zeros(B, T, H, device=q.device)
    for b in range(B):
        for h in range(H):
            kv = h // (H // H_kv)
            factors = [1.0 if x is None else float(x[b, n]) for x, n in ((q_scale, h), (k_scale, kv), (v_scale, kv))]
            scores = q[b, :, h].float() @ k[b, :, kv].float().mT * (scale * factors[0] * factors[1])
            if softcap is not None:
                scores = capped(scores, softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            sink = scores.new_full((T, 1), float("-inf") if sinks is None else float(sinks[h]))
            lse[b, :, h] = torch.logsumexp(torch.cat((scores, sink), -1), -1)
            weights = torch.exp(scores - lse[b, :, h].nan_to_num(nan=float("nan"), neginf=0.0)[:, None])
            out[b, :, h] = weights @ v[b, :, kv].float() * factors[2]
    out = out.to(torch.bfloat16 if q.element_size() == 1 else q.dtype)
    return (out, lse) if return_lse else out

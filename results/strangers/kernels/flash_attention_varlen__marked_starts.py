"""WRONG.  The sequence of a token is the number of starts up to it: a 1 is put at the start of each sequence but
the first, and the ones are summed.  A sequence without queries or without keys starts where the next one does, and
both put the same 1.  All later sequences then have a wrong number, and queries see the keys of others.  If the last
sequence is empty, its start lies behind the end and an exception is raised."""

import torch

from rooflab.kernels.registry import register


def numbers(cu, count):
    marks = torch.zeros(count, dtype=torch.int64, device=cu.device)
    marks[cu[1:-1].long()] = 1
    return marks.cumsum(0)


@register(op="flash_attention_varlen", name="marked_starts", role="optimized", backend="torch")
def flash_attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal=False,
    softmax_scale=None,
    *,
    window=None,
    softcap=None,
    return_lse=False,
):
    (T, H, D), (S, H_kv, _) = q.shape, k.shape
    mine, its = numbers(cu_seqlens_q, T), numbers(cu_seqlens_k, S)
    seen = mine[:, None] == its
    if causal:
        from_end_q = cu_seqlens_q[1:][mine] - torch.arange(T, device=q.device)
        from_end_k = cu_seqlens_k[1:][its] - torch.arange(S, device=q.device)
        gap = from_end_k - from_end_q[:, None]
        seen = seen & (gap >= 0)
        if window is not None:
            seen = seen & (gap < window)
    scores = torch.einsum("tkgd,skd->kgts", q.double().unflatten(1, (H_kv, H // H_kv)), k.double())
    scores = scores * (D**-0.5 if softmax_scale is None else softmax_scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    out = torch.einsum("kgts,skd->tkgd", weights, v.double()).flatten(1, 2).to(q.dtype)
    return (out, lse.flatten(0, 1).mT.float().contiguous()) if return_lse else out

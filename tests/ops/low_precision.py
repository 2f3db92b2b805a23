"""Attention that keeps one of its intermediates in the dtype of its inputs: wrong, and hard to see."""

import torch


def attention(rounded):
    """Causal-less attention in fp32, with `rounded` (scores, accumulator or denominator) rounded to the input dtype.

    The accumulator is rounded after each tile of 64 keys, as a kernel that keeps it in 16 bits rounds it.
    """

    def kernel(q, k, v, causal=False, softmax_scale=None):
        group = q.shape[2] // k.shape[2]
        queries = q.transpose(1, 2).float()
        keys, values = (x.transpose(1, 2).float().repeat_interleave(group, 1) for x in (k, v))
        scores = queries @ keys.mT * (softmax_scale or q.shape[-1] ** -0.5)
        if rounded == "scores":
            scores = scores.to(q.dtype).float()
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = torch.zeros_like(weights[..., :1])
        acc = torch.zeros_like(queries)
        for start in range(0, k.shape[1], 64):
            tile = weights[..., start : start + 64]
            total += tile.sum(-1, keepdim=True)
            acc += tile.to(q.dtype).float() @ values[:, :, start : start + 64]
            if rounded == "denominator":
                total = total.to(q.dtype).float()
            if rounded == "accumulator":
                acc = acc.to(q.dtype).float()
        return (acc / total).transpose(1, 2).to(q.dtype).contiguous()

    return kernel

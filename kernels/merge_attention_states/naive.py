"""A softmax over the parts' log-sum-exps, and the weighted sum of their outputs, step by step."""

from __future__ import annotations

import math

import torch

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels.merge_attention_states._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM; the weighted outputs are fp32."""
    outs, lses = inputs.outs, inputs.lses
    parts, size = outs.numel(), outs.element_size()
    result = parts // outs.shape[0]
    # In this order: mask, log-sum-exp, its mask, weights, cast, mask, product, sum, output.
    read = (4 * lses.numel()) * 4 + parts * size + 3 * 4 * parts + 4 * result
    write = (3 * lses.numel()) * 4 + 3 * 4 * parts + (4 + size) * result + 4 * lses[0].numel()
    return Traffic(read, write, launches=12)


@register(op="merge_attention_states", name="naive", role="naive", backend="torch", traffic=traffic)
def merge_attention_states(outs: torch.Tensor, lses: torch.Tensor, out: Returned | None = None) -> Returned:
    """The merged output and log-sum-exp.  outs: (P, T, H, D); lses: (P, T, H) fp32; returns (T, H, D), (T, H) fp32.

    Raises `ValueError` on wrong shapes or dtypes.
    """
    check_operands(outs, lses)
    merged, lse = outputs(out, tuple(outs.shape[1:]), outs, return_lse=True)
    assert lse is not None
    lses = lses.masked_fill(lses == math.inf, -math.inf)  # as some libraries write of a part that saw no key
    total = torch.logsumexp(lses, dim=0)
    # If no part saw a key, -inf - -inf would be NaN; if one part saw no key, its output is undefined.
    weights = torch.exp(lses - total.masked_fill(total == -math.inf, 0.0))
    kept = outs.float().masked_fill((lses == -math.inf)[..., None], 0.0)
    merged.copy_((weights[..., None] * kept).sum(0))
    return merged, lse.copy_(total)

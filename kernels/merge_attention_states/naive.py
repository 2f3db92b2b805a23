"""The kernel `naive` computes a softmax over the parts' log-sum-exps, then the weighted sum of their outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Computes a softmax over the parts' log-sum-exps, and the weighted sum of their outputs."""
    lses = lses.masked_fill(lses == math.inf, -math.inf)  # as some libraries write of a part that saw no key
    merged_lse = torch.logsumexp(lses, dim=0)
    # If no part saw a key, -inf - -inf would be NaN; if one part saw no key, its output is undefined.
    weights = torch.exp(lses - merged_lse.masked_fill(merged_lse == -math.inf, 0.0))
    part_values = outs.float().masked_fill((lses == -math.inf)[..., None], 0.0)
    out.copy_((weights[..., None] * part_values).sum(0))
    lse.copy_(merged_lse)

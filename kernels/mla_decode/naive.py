"""The kernel `naive` gathers the latents of one sequence after another, then computes scores, softmax and output."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    latent_dim: int,
    softmax_scale: float,
    return_lse: bool,
) -> None:
    """Computes one sequence's attention after another.  The host reads the lengths, and so waits for the device."""
    block_size = kv_cache.shape[1]
    for b, length in enumerate(seq_lens.tolist()):
        token = torch.arange(length, device=q.device)
        latents = kv_cache[block_table[b].long()[token // block_size], token % block_size].float()  # (length, D)
        scores = q[b].float() @ latents.mT * softmax_scale  # (H, length)
        log_denominator = torch.logsumexp(scores, dim=-1)
        # The denominator of an empty sequence is -inf, and -inf - -inf would be NaN.
        weights = torch.exp(scores - log_denominator.masked_fill(log_denominator == -math.inf, 0.0)[:, None])
        out[b] = weights @ latents[:, :latent_dim]
        if lse is not None:
            lse[b] = log_denominator

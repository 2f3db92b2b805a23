"""The kernel `library` gathers the pages, then calls torch's scaled_dot_product_attention.  torch's functions with a
block table take at most 256 dimensions per head.

All heads share a key, so the heads are passed as queries: `[B, 1, H, D]`, with keys `[B, 1, S, D]`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def library(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *, latent_dim: int, softmax_scale: float
) -> Tensor:
    """Gathers all pages of the table and masks unused tokens.  The host reads no lengths.  torch makes the output."""
    B, _, D = q.shape
    num_slots = block_table.shape[1] * kv_cache.shape[1]
    hidden_mask = torch.arange(num_slots, device=q.device) >= seq_lens[:, None]  # (B, slots)
    page_ids = block_table.clamp(0, len(kv_cache) - 1).reshape(-1)
    latents = kv_cache.index_select(0, page_ids).view(B, num_slots, D).masked_fill_(hidden_mask[..., None], 0)[:, None]
    result = F.scaled_dot_product_attention(
        q[:, None], latents, latents[..., :latent_dim], attn_mask=~hidden_mask[:, None, None], scale=softmax_scale
    )
    return result[:, 0].masked_fill((seq_lens == 0)[:, None, None], 0)

"""The kernel `naive` computes the definition by torch calls, over every row of target and draft probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.philox import log_exponential, philox, words_of_rows
from rooflab.reference.speculative_verify import RECOVERY_STREAM


@kernel(backend="torch")
def naive(
    draft_tokens: Tensor,
    target_probs: Tensor,
    num_drafts: Tensor,
    seed: Tensor,
    position: Tensor,
    tokens: Tensor,
    num_accepted: Tensor,
    *,
    draft_probs: Tensor | None,
) -> None:
    """Accepts drafts and draws a token by torch calls.  The output tokens are padded with -1."""
    B, K = draft_tokens.shape
    V = target_probs.shape[2]
    draft_index = torch.arange(K, device=seed.device)
    draft_mask = draft_index < num_drafts[:, None]
    drafted_ids = torch.where(draft_mask, draft_tokens, 0)[..., None]
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:, :K]).scatter_(2, drafted_ids, 1.0)
    random_words = philox(seed[:, None], position[:, None] + draft_index, torch.zeros_like(draft_index), stream=1)[0]
    uniform_draws = random_words.float().mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    p = target_probs[:, :K].gather(2, drafted_ids).squeeze(2)
    q = draft_probs.gather(2, drafted_ids).squeeze(2)
    accepted_mask = (draft_mask & (uniform_draws * q < p)).long().cumprod(1)
    accepted_count = accepted_mask.sum(1)
    # The law after the accepted drafts: what the draft left of the target, or after all drafts the target.
    rows = torch.arange(B, device=seed.device)
    target_row = target_probs[rows, accepted_count]
    residual = target_row if not K else (target_row - draft_probs[rows, accepted_count.clamp(max=K - 1)]).clamp(min=0)
    draws_target = (accepted_count >= num_drafts) | ~residual.any(1)
    weights = torch.where(draws_target[:, None], target_row, residual)
    draw_stream = torch.where(accepted_count < num_drafts, RECOVERY_STREAM, 0)
    scores = weights.log() - log_exponential(words_of_rows(seed, position + accepted_count, V, draw_stream))
    tokens.fill_(-1)
    tokens[:, :K] = torch.where(accepted_mask > 0, draft_tokens, -1)
    tokens[rows, accepted_count] = scores.argmax(1)
    num_accepted.copy_(accepted_count)

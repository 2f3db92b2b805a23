"""The kernel `fused` has one program per sequence.  It computes all acceptance ratios at once, from the probabilities
of the drafted tokens alone.  Then one pass reads the row of the next token.  No residual is in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.race import log_exponential
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic

NUM_WARPS = 16
BLOCK = 2048
"""The number of tokens in a step of the pass: a single program must keep enough loads in flight."""


def traffic(inputs: Arguments) -> Traffic:
    """Returns the bytes that a call moves.  From each probability tensor, a call reads one row per sequence, and 32
    bytes (a memory sector) per drafted token."""
    B, K = inputs.draft_tokens.shape
    V = inputs.target_probs.shape[2]
    tensor_count = 1 if inputs.draft_probs is None else 2
    return Traffic(tensor_count * B * (4 * V + 32 * K) + 8 * B * K + 20 * B, 8 * B * (K + 1) + 4 * B)


@triton.jit
def race(
    p_ptr, q_ptr, drafted, seed, position, stream, V, HAS_Q: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the token that wins the random draw, and its score.  Weights: `p`, or with `RESIDUAL` `max(p - q, 0)`."""
    lane_best_score = tl.full((BLOCK,), float("-inf"), tl.float32)
    lane_token = tl.full((BLOCK,), 0, tl.int32)
    for first_token in range(0, V, BLOCK):
        tokens = first_token + tl.arange(0, BLOCK)
        weight = tl.load(p_ptr + tokens, mask=tokens < V, other=0.0)
        if RESIDUAL and HAS_Q:
            weight = weight - tl.load(q_ptr + tokens, mask=tokens < V, other=0.0)
        elif RESIDUAL:
            weight = tl.where(tokens == drafted, weight - 1.0, weight)
        philox_blocks = (first_token // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, position, philox_blocks, stream, 0)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        race_score = tl.log(tl.where(weight > 0.0, weight, 1.0)) - log_exponential(words)
        is_better = (weight > 0.0) & (race_score > lane_best_score)
        lane_best_score = tl.where(is_better, race_score, lane_best_score)
        lane_token = tl.where(is_better, tokens, lane_token)
    best_score = tl.max(lane_best_score, 0)
    return tl.min(tl.where(lane_best_score == best_score, lane_token, V - 1), 0), best_score


@triton.jit
def fused_kernel(
    draft_ptr,
    p_ptr,
    num_drafts_ptr,
    seed_ptr,
    position_ptr,
    q_ptr,
    tokens_ptr,
    accepted_ptr,
    K,
    V,
    HAS_Q: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)  # int64: (K + 1) * V * b passes 2**31
    draft_count = tl.load(num_drafts_ptr + b)
    seed = tl.load(seed_ptr + b)
    position = tl.load(position_ptr + b)
    p_ptr += b * (K + 1) * V
    q_ptr += b * K * V
    draft_index = tl.arange(0, PLACES)
    draft_mask = draft_index < draft_count
    draft = tl.load(draft_ptr + b * K + draft_index, mask=draft_mask, other=0)
    p = tl.load(p_ptr + draft_index.to(tl.int64) * V + draft, mask=draft_mask, other=0.0)
    q = tl.full((PLACES,), 1.0, tl.float32)
    if HAS_Q:
        q = tl.load(q_ptr + draft_index.to(tl.int64) * V + draft, mask=draft_mask, other=1.0)
    word, _, _, _ = tl.philox(seed, ((position + draft_index) & 0xFFFFFFFF).to(tl.uint32), 0, 1, 0)
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.999999940395355224609375)
    is_rejected = draft_mask & (u * q >= p)
    accepted_count = tl.minimum(tl.min(tl.where(is_rejected, draft_index, PLACES), 0), draft_count)
    token_position = ((position + accepted_count) & 0xFFFFFFFF).to(tl.uint32)
    p_ptr += accepted_count.to(tl.int64) * V
    q_ptr += accepted_count.to(tl.int64) * V
    drafted_token = tl.sum(tl.where(draft_index == accepted_count, draft, 0), 0)
    token = 0
    best_score = float("-inf")
    draw_stream = tl.where(accepted_count < draft_count, 2, 0).to(tl.uint32)  # `RECOVERY_STREAM` of the reference
    if accepted_count < draft_count:
        token, best_score = race(p_ptr, q_ptr, drafted_token, seed, token_position, draw_stream, V, HAS_Q, True, BLOCK)
    if best_score == float("-inf"):
        token, best_score = race(p_ptr, q_ptr, drafted_token, seed, token_position, draw_stream, V, HAS_Q, False, BLOCK)
    out = tl.where(draft_index < accepted_count, draft, tl.where(draft_index == accepted_count, token, -1)).to(tl.int64)
    tl.store(tokens_ptr + b * (K + 1) + draft_index, out, mask=draft_index <= K)
    tl.store(accepted_ptr + b, accepted_count)


@kernel(
    backend="triton",
    traffic=traffic,
    over="naive",
    shows={
        "": 'calls("naive").total > 50',
        "in fp32": "stack_bytes == 0 and len(loops) >= 2 and not any(loop.global_store for loop in loops)",
    },
)
def fused(
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
    """Verifies the drafts in one launch.  The output tokens are padded with -1."""
    (B, K), V = draft_tokens.shape, target_probs.shape[2]
    draft_or_target = target_probs if draft_probs is None else draft_probs
    fused_kernel[(B,)](
        draft_tokens,
        target_probs,
        num_drafts,
        seed,
        position,
        draft_or_target,
        tokens,
        num_accepted,
        K,
        V,
        HAS_Q=draft_probs is not None,
        PLACES=next_power_of_2(K + 1),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )

"""The kernel `bisect` finds the least logit that top-k and top-p keep, by bisection and without a sort.

One program computes one row.  A float becomes a uint32 key with the same order.  A pass over the row compares the keys
with 16 thresholds, so eight passes find the exact limit.  A last pass takes equal keys in index order, and draws a
token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.race import log_exponential
from rooflab.kernels.sample._args import EditTensor, edited, note_logprobs
from rooflab.reference.sample import SPEC
from rooflab.reference.sample_rules import Edits

MAX_VOCABULARY = 2**24
"""The largest vocabulary: fp32 counts tokens exactly up to this number."""
NUM_WARPS = 8
BLOCK = 1024
SEARCH_BLOCK = 512
"""Tokens of a step of the search: 32 registers of a thread hold tokens and 16 thresholds.  BLOCK: in other passes."""


@triton.jit
def load_row(row_ptr, start, V, BLOCK: tl.constexpr):
    """Loads BLOCK logits as fp32, with -inf past the end.  NaN becomes -inf, and +inf becomes the largest float.  So
    the drawn token is in the vocabulary."""
    tokens = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    return tokens, tl.minimum(logits, 3.4028234663852886e38)


@triton.jit
def to_key(x):
    """Returns a uint32 key with the same order as x; -0.0 and 0.0 have the same key."""
    float_bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((float_bits >> 31) == 1, float_bits ^ 0xFFFFFFFF, float_bits | 0x80000000)


@triton.jit
def from_key(key):
    """Returns the float from which `to_key` made `key`."""
    return tl.where((key >> 31) == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, best, temperature):
    """Returns `exp((x - best) / temperature)`.  The division comes last, so its rounding is relative to `x - best`."""
    return tl.exp(tl.div_rn(x - best, temperature))


@triton.jit
def find_cut(row_ptr, limit, best, temperature, V, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the smallest key above which there are fewer than `limit` tokens.  With `BY_MASS`, the total weight of
    the tokens above the key, and not their number, is less than `limit`."""
    digit_values = tl.arange(0, 16)
    key_prefix = tl.full((), 0, tl.uint32)
    for digit_step in range(8):
        bit_shift = 28 - 4 * digit_step
        thresholds = key_prefix | (digit_values << bit_shift).to(tl.uint32, bitcast=True) | ((1 << bit_shift) - 1)
        sums_above = tl.zeros((BLOCK, 16), tl.float32)
        for block_start in range(0, V, BLOCK):
            tokens, logits = load_row(row_ptr, block_start, V, BLOCK)
            weight = tl.where(tokens < V, 1.0, 0.0)
            if BY_MASS:
                weight = weigh(logits, best, temperature)
            sums_above += tl.where(to_key(logits)[:, None] > thresholds[None, :], weight[:, None], 0.0)
        # `sums_above` falls as the digit rises, and the step before made its sum less than `limit` at the last digit.
        key_digit = tl.min(tl.where(tl.sum(sums_above, 0) < limit, digit_values, 15), 0)
        key_prefix = key_prefix | (key_digit << bit_shift).to(tl.uint32, bitcast=True)
    return key_prefix


@triton.jit
def tail_of(row_ptr, cut, best, temperature, V, BLOCK: tl.constexpr):
    """Returns how many tokens have keys above `cut` (the tail of the distribution), and their total weight."""
    above_count = tl.zeros((BLOCK,), tl.int32)
    mass_sums = tl.zeros((BLOCK,), tl.float32)
    for block_start in range(0, V, BLOCK):
        _, logits = load_row(row_ptr, block_start, V, BLOCK)
        is_above_cut = to_key(logits) > cut
        above_count += is_above_cut.to(tl.int32)
        mass_sums += tl.where(is_above_cut, weigh(logits, best, temperature), 0.0)
    return tl.sum(above_count, 0), tl.sum(mass_sums, 0)


@triton.jit
def bisect_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    out_ptr,
    V,
    row_stride,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31 at 14,135 rows of 151,936
    row_ptr = logits_ptr + b * row_stride
    temperature = tl.load(temperature_ptr + b)
    top_k = tl.load(top_k_ptr + b)
    top_p = tl.load(top_p_ptr + b)
    min_p = tl.load(min_p_ptr + b)
    seed = tl.load(seed_ptr + b)
    position = (tl.load(position_ptr + b) & 0xFFFFFFFF).to(tl.uint32)

    # Each lane keeps the first of equal values, so the lowest index wins.
    lane_best_value = tl.full((BLOCK,), float("-inf"), tl.float32)
    lane_token = tl.full((BLOCK,), 0, tl.int32)
    for block_start in range(0, V, BLOCK):
        tokens, logits = load_row(row_ptr, block_start, V, BLOCK)
        is_better = logits > lane_best_value
        lane_best_value = tl.where(is_better, logits, lane_best_value)
        lane_token = tl.where(is_better, tokens, lane_token)
    best_logit = tl.max(lane_best_value, 0)
    best_token = tl.min(tl.where(lane_best_value == best_logit, lane_token, V), 0)

    if (temperature > 0.0) & (best_logit > float("-inf")):
        cut_key = tl.full((), 0, tl.uint32)
        ties_left = V
        above_mass = 0.0
        mass_limit = float("inf")
        if (top_k > 0) & (top_k < V):
            cut_key = find_cut(row_ptr, top_k.to(tl.float32), best_logit, temperature, V, False, SEARCH_BLOCK)
            above_count, above_mass = tail_of(row_ptr, cut_key, best_logit, temperature, V, BLOCK)
            ties_left = top_k - above_count
        if top_p < 1.0:
            if (top_k > 0) & (top_k < V):
                mass_limit = top_p * (above_mass + ties_left * weigh(from_key(cut_key), best_logit, temperature))
            else:
                _, kept_mass = tail_of(row_ptr, cut_key, best_logit, temperature, V, BLOCK)
                mass_limit = top_p * kept_mass
            mass_cut = find_cut(row_ptr, mass_limit, best_logit, temperature, V, True, SEARCH_BLOCK)
            if mass_cut > cut_key:
                cut_key = mass_cut
                ties_left = V
            _, above_mass = tail_of(row_ptr, cut_key, best_logit, temperature, V, BLOCK)

        lane_best_value = tl.full((BLOCK,), float("-inf"), tl.float32)
        lane_token = tl.full((BLOCK,), 0, tl.int32)
        ties_before = 0
        for block_start in range(0, V, BLOCK):
            tokens, logits = load_row(row_ptr, block_start, V, BLOCK)
            key = to_key(logits)
            weight = weigh(logits, best_logit, temperature)
            is_tie = (key == cut_key).to(tl.int32)
            tie_rank = ties_before + tl.cumsum(is_tie, 0) - is_tie
            keeps_tie = (is_tie > 0) & (tie_rank < ties_left) & (above_mass + tie_rank * weight < mass_limit)
            in_support = ((key > cut_key) | keeps_tie) & (weight >= min_p) & (logits > float("-inf"))
            ties_before += tl.sum(is_tie, 0)
            if tl.sum(in_support.to(tl.int32), 0) > 0:
                philox_blocks = (block_start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
                w0, w1, w2, w3 = tl.philox(seed, position, philox_blocks, 0, 0)
                words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # of tokens 0, 1, 2, 3, 4 ...
                race_score = tl.div_rn(logits - best_logit, temperature) - log_exponential(words)
                is_better = in_support & (race_score > lane_best_value)
                lane_best_value = tl.where(is_better, race_score, lane_best_value)
                lane_token = tl.where(is_better, tokens, lane_token)
        best_token = tl.min(tl.where(lane_best_value == tl.max(lane_best_value, 0), lane_token, V), 0)
    tl.store(out_ptr + b, best_token.to(tl.int64))


@kernel(
    backend="triton",
    traffic=SPEC.least,
    limits={"V": MAX_VOCABULARY},
    over="naive",
    shows={
        "": (
            'calls("naive").sorted_elements > 0 and calls("naive").total >= 10 and launched == 1; '
            "STG_E_64 == global_store == 1 and len(loops) > 1 and not any(loop.global_store for loop in loops); "
            'in_ptx("div.rn.f32") and not in_ptx("lg2.approx")'
        )
    },
)
def bisect(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    tokens: Tensor,
    logprob_ids: Tensor | None,
    logprobs: Tensor | None,
    *,
    top_n: int | None,
    **edits: EditTensor,
) -> None:
    """Draws tokens without a sort.  torch calls edit the logits before it, and compute log-probabilities after it."""
    B, V = logits.shape
    has_edits = any(edit_tensor is not None for edit_tensor in edits.values())
    rows = edited(logits, Edits(**edits)) if has_edits else logits  # the kernel itself takes 16 bits
    bisect_kernel[(B,)](
        rows,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        tokens,
        V,
        rows.stride(0),
        BLOCK=BLOCK,
        SEARCH_BLOCK=SEARCH_BLOCK,
        num_warps=NUM_WARPS,
    )
    note_logprobs(logits, tokens, logprob_ids, logprobs)

"""Computes which tokens a row of logits may draw, with their probabilities, and checks the token that a kernel drew."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.distribution import chi_square
from rooflab.reference.philox import race
from rooflab.reference.spec import FP32_ROUNDOFF, Inputs, Outputs, Scheme

MASS_TOLERANCE = 4e-6
"""fp32's error of a cumulative probability: a token this close to top_p may be inside or outside the support."""


EDIT_ARGUMENTS = ("logits", "repetition_penalty", "presence_penalty", "frequency_penalty") + (
    *("edit_offsets", "edit_ids", "edit_counts", "edit_bias"),
    "allowed",
)
"""The arguments that decide a row's logits."""


SCORE_ULPS = 16.0
"""fp32's error of a score, in roundoffs of each term: a subtraction, a division and two logarithms."""
LAW_DRAWS, LAW_TOKENS = 256, 16
"""The number of rows whose draws are tested against their probabilities, and the most tokens that they may draw."""
LAW_P_VALUE = 1e-9
"""The test of draws rejects below this p-value.  So a right kernel fails less than once in a million checks."""


@dataclass(frozen=True)
class Support:
    """The tokens that one row of logits may draw (the support), with their probabilities. All tensors are (V,)."""

    probabilities: torch.Tensor
    """Probabilities of the draw in fp64, renormalised over `kept`; 0 elsewhere."""
    kept: torch.Tensor
    """True for each token of the support, by fp64 arithmetic."""
    doubtful: torch.Tensor
    """True for each token so near to top_p or min_p that fp32 may put the token on either side."""
    scores: torch.Tensor
    """The scores, logits / temperature, in fp64."""


def support(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Support:
    """Returns the tokens that one row may draw, with their probabilities. temperature > 0; logits: (V,).

    Tokens are ordered by descending probability, then by ascending index. top_k keeps the first k tokens and
    renormalises. top_p keeps a token if the tokens before it have a total probability below top_p. min_p keeps tokens
    with at least min_p times the largest probability."""
    scores = logits.detach().cpu().double() / temperature
    n = min(top_k or len(scores), int((scores > -math.inf).sum()))
    # Sorting only the first n of 128,256 values takes 2 to 5 ms, sorting all with their ids 12 ms (one EPYC core).
    n_largest = torch.from_numpy(np.sort(np.partition(scores.numpy(), len(scores) - n)[len(scores) - n :])[::-1].copy())
    top_weights = torch.exp(n_largest[:n] - n_largest[0])
    # With 2**n equal weights, every sum and quotient is exact in fp32, and there is no doubt.
    is_exact = bool((top_weights == 1).all()) and n & (n - 1) == 0
    in_support = top_k_mask = _first(scores, n_largest, n)
    doubtful_mask = torch.zeros_like(in_support)
    if top_p < 1:
        cumulative_mass = (top_weights / top_weights.sum()).cumsum(0)
        mass_before = torch.cat([cumulative_mass.new_zeros(1), cumulative_mass[:-1]])
        in_support = _first(scores, n_largest, int((mass_before < top_p).sum()))
        if not is_exact:
            kept_counts = (int((mass_before - top_p < limit).sum()) for limit in (-MASS_TOLERANCE, MASS_TOLERANCE))
            doubtful_mask = torch.logical_xor(*(_first(scores, n_largest, kept_count) for kept_count in kept_counts))
    score_gap = n_largest[0] - scores
    weights = torch.exp(-score_gap)
    if min_p > 0:
        in_support = in_support & (weights >= min_p)
        if not is_exact:
            doubtful_mask |= top_k_mask & (
                (score_gap + math.log(min_p)).abs() <= SCORE_ULPS * FP32_ROUNDOFF * (score_gap + 1)
            )
    kept_weights = torch.where(in_support, weights, 0.0)
    return Support(kept_weights / kept_weights.sum(), in_support, doubtful_mask, scores)


def _first(scores: torch.Tensor, ordered: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a mask (V,) of the `count` tokens with the highest scores. Of equal scores, the lower token index comes
    first. `ordered` holds the scores in descending order."""
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    above_mask, tie_mask = scores > ordered[count - 1], scores == ordered[count - 1]
    return above_mask | (tie_mask & (tie_mask.cumsum(0) <= count - above_mask.sum()))


def edited(
    logits: torch.Tensor,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    edit_offsets: torch.Tensor | None = None,
    edit_ids: torch.Tensor | None = None,
    edit_counts: torch.Tensor | None = None,
    edit_bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the logits (B, V) after edits and mask, in fp32 on the CPU. The arguments are as in `reference`.

    Every operation is rounded to fp32, so that each kernel gets the same logits, and the same ties."""
    edited_rows = logits.detach().cpu().float().numpy().copy()
    if edit_offsets is not None and edit_ids is not None and edit_counts is not None and edit_bias is not None:
        B = len(edited_rows)
        neutral_penalties = np.ones(B, np.float32), np.zeros(B, np.float32), np.zeros(B, np.float32)
        penalty_tensors = (repetition_penalty, presence_penalty, frequency_penalty)
        penalties = [
            neutral_penalty if penalty is None else penalty.cpu().numpy()
            for penalty, neutral_penalty in zip(penalty_tensors, neutral_penalties, strict=True)
        ]
        row_offsets, token_ids, token_counts = edit_offsets.tolist(), edit_ids.tolist(), edit_counts.tolist()
        biases = edit_bias.cpu().numpy()
        for b in range(B):
            repeat_factor, presence_cost, frequency_cost = (row_penalties[b] for row_penalties in penalties)
            for edit_index in range(row_offsets[b], row_offsets[b + 1]):
                new_logit = edited_rows[b, token_ids[edit_index]] + biases[edit_index]
                if token_counts[edit_index] >= 0:
                    new_logit = new_logit / repeat_factor if new_logit > 0 else new_logit * repeat_factor
                if token_counts[edit_index] > 0:
                    new_logit = new_logit - (frequency_cost * np.float32(token_counts[edit_index]) + presence_cost)
                edited_rows[b, token_ids[edit_index]] = new_logit
    if allowed is not None:
        allowed_bits = np.unpackbits(allowed.cpu().contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
        edited_rows[allowed_bits[:, : edited_rows.shape[1]] == 0] = -math.inf
    return torch.from_numpy(edited_rows)


def compare(actual: Outputs, oracle: Outputs, inputs: Inputs, scheme: Scheme) -> list[ErrorStats]:
    """Checks the token that a kernel drew for each row. A greedy token must equal the reference's. A random token must
    be allowed by top_k, top_p and min_p, and must have the best score.

    Fp32 rounding may decide whether a token is allowed. A kernel may draw such a doubtful token. The margin for top_p
    is `MASS_TOLERANCE`.

    A score is logit / T - log E, with T the temperature and E exponential noise. Two scores count as equal if they
    differ by at most the sum of their fp32 errors. The fp32 error of a score is:

        SCORE_ULPS * 2**-24 * (|logit / T| + (best logit - logit) / T + |log E| + 1)
    """
    return _compare(actual, oracle, inputs, wins=True)


def compare_own_stream(actual: Outputs, oracle: Outputs, inputs: Inputs, scheme: Scheme) -> list[ErrorStats]:
    """Checks a kernel that has its own random numbers. A random token must be allowed by top_k, top_p and min_p, but
    need not have the best score. A tie with the last allowed token is accepted, because some kernels keep all ties.
    Draws of many equal rows must follow their probabilities (`_off_law`). Other checks are as in `compare`."""
    tokens, *other_stats = _compare(actual, oracle, inputs, wins=False)
    note = _off_law(actual[0].cpu(), inputs) if tokens.passed and len(actual[0]) >= LAW_DRAWS else ""
    if note:
        tokens = replace(tokens, passed=False, max_abs_error=math.inf, max_error_over_tolerance=math.inf, note=note)
    return [tokens, *other_stats]


def _off_law(drawn_tokens: torch.Tensor, inputs: Inputs) -> str:
    """Returns how the draws of `LAW_DRAWS` rows with equal logits and settings contradict their probabilities, or "".

    Tests the counts of the tokens, and the counts of the pairs in neighbouring rows, which must be independent."""
    edited_rows = edited(**{arg_name: arg for arg_name, arg in inputs.items() if arg_name in EDIT_ARGUMENTS})
    row_settings = [inputs[name].cpu() for name in ("temperature", "top_k", "top_p", "min_p")]
    for start in range(0, len(drawn_tokens) - LAW_DRAWS + 1, LAW_DRAWS):
        block = slice(start, start + LAW_DRAWS)
        are_equal = all(bool((rows[block] == rows[start]).all()) for rows in (*row_settings, edited_rows))
        if not are_equal or row_settings[0][start] == 0:
            continue
        row_law = support(edited_rows[start], *(values[start].item() for values in row_settings)).probabilities
        kept_ids = row_law.nonzero().flatten()
        if len(kept_ids) > LAW_TOKENS or not row_law[drawn_tokens[block]].all():  # or an accepted tie was drawn
            continue
        law, draws = row_law[kept_ids], torch.searchsorted(kept_ids, drawn_tokens[block])
        pairs = draws[:-1] * len(law) + draws[1:]
        cell_tests = [("the probabilities", draws, law)]
        # Pairs that share a row are not independent, so every second pair is a test of its own.
        cell_tests += [("independent rows", pairs[i::2], torch.outer(law, law).flatten()) for i in (0, 1)]
        for expected_name, cells, cell_law in cell_tests:
            with suppress(ValueError):  # too many tokens for so few draws
                p_value = chi_square(cells, cell_law).p_value
                if p_value < LAW_P_VALUE:
                    return f"{LAW_DRAWS} equal rows contradict {expected_name}: chi-square's p-value is {p_value:.1g}"
    return ""


def _compare(actual: Outputs, oracle: Outputs, inputs: Inputs, wins: bool) -> list[ErrorStats]:
    drawn_tokens, best_ids = actual[0], oracle[0].cpu()
    if drawn_tokens.shape != best_ids.shape or drawn_tokens.dtype != torch.int64:
        note = f"expected {tuple(best_ids.shape)} int64, got {tuple(drawn_tokens.shape)} {drawn_tokens.dtype}"
        failed_stats = ErrorStats("tokens", False, math.nan, math.inf, best_ids.numel(), best_ids.numel(), note=note)
        return [failed_stats, *_compare_logprobs(actual, oracle, inputs)]
    edited_rows = edited(**{arg_name: arg for arg_name, arg in inputs.items() if arg_name in EDIT_ARGUMENTS})
    worst_ratio, worst_row, errors, worst_error = 0.0, 0, 0, 0.0
    for b, (token, best_token) in enumerate(zip(drawn_tokens.tolist(), best_ids.tolist(), strict=True)):
        if token == best_token:
            continue
        score_error, ratio = _judge_row(token, best_token, edited_rows[b], inputs, b, wins)
        errors += not ratio <= 1
        if not ratio <= worst_ratio:
            worst_ratio, worst_row, worst_error = ratio, b, score_error
    tokens = ErrorStats(
        "tokens", errors == 0, worst_error, worst_ratio, errors, best_ids.numel(), (worst_row,) if errors else ()
    )
    return [tokens, *_compare_logprobs(actual, oracle, inputs)]


def _compare_logprobs(actual: Outputs, oracle: Outputs, inputs: Inputs) -> list[ErrorStats]:
    """Compares the returned token ids and log-probabilities with their expected values. The first id is the drawn
    token. The other ids must be exact, because sorting rounds nothing. A log-probability may have the fp32 error of a
    softmax sum and of a score."""
    if len(oracle) == 1:
        return []
    logits = inputs["logits"].detach().cpu().double()
    V = logits.shape[1]
    token_ids = torch.cat([actual[0].cpu()[:, None].clamp(0, V - 1), oracle[1].cpu()[:, 1:]], dim=1)
    token_logprobs = logits.log_softmax(-1).gather(1, token_ids)
    logit_gap = (logits.max(-1, keepdim=True).values - logits.gather(1, token_ids)).nan_to_num(posinf=0.0)
    limit = MASS_TOLERANCE + SCORE_ULPS * FP32_ROUNDOFF * (logit_gap + token_logprobs.abs().nan_to_num(posinf=0.0) + 1)
    id_stats = elementwise("logprob_ids", actual[1].cpu(), token_ids, torch.zeros_like(token_logprobs))
    return [id_stats, elementwise("logprobs", actual[2].cpu(), token_logprobs, limit)]


def _judge_row(token: int, best: int, row: torch.Tensor, inputs: Inputs, b: int, wins: bool) -> tuple[float, float]:
    """Returns the distance of the score of `token` below the best score, and the ratio of this distance to the allowed
    distance. Both are inf if the token is forbidden."""
    row_settings = [inputs[arg][b].item() for arg in ("temperature", "top_k", "top_p", "min_p", "seed", "position")]
    if not 0 <= token < len(row) or row_settings[0] == 0:
        return math.inf, math.inf
    if not wins:
        return (0.0, 0.0) if _tied_or_in_support(row, token, *row_settings[:4]) else (math.inf, math.inf)
    row_support = support(row, *row_settings[:4])
    if not bool(row_support.kept[token] | row_support.doubtful[token]):
        return math.inf, math.inf
    race_noise = race(row_settings[4], row_settings[5], len(row))
    scores = row_support.scores - race_noise
    certain_mask = row_support.kept & ~row_support.doubtful
    if bool(certain_mask.any()):
        best = int(scores.masked_fill(~certain_mask, -math.inf).argmax())
    max_error = 0.0
    for i in (token, best):
        score_gap = float(row_support.scores.max() - row_support.scores[i])
        max_error += (
            SCORE_ULPS * FP32_ROUNDOFF * (abs(float(row_support.scores[i])) + score_gap + abs(float(race_noise[i])) + 1)
        )
    score_error = max(0.0, float(scores[best] - scores[token]))
    return score_error, score_error / max_error


def _tied_or_in_support(
    row: torch.Tensor, token: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> bool:
    """Returns True if one row of logits may draw `token`. A tie with the last allowed token also gives True. This check
    is fast, because it does not sort the logits. Kernels with their own random numbers need it for almost every row."""
    scores = row.double() / temperature
    above_mask = scores > scores[token]
    weights = torch.exp(scores - scores.max())
    kept_mass = weights.topk(top_k).values.sum() if 0 < top_k < len(row) else weights.sum()
    return bool(
        (scores[token] > -math.inf)
        & (above_mask.sum() < (top_k or len(row)))
        & (weights[above_mask].sum() < (top_p + MASS_TOLERANCE) * kept_mass)
        & (weights[token] >= min_p * (1 - MASS_TOLERANCE))
    )

"""The law of a draw: the tokens that a row of logits may draw, and whether a kernel drew one of these tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.philox import race
from rooflab.reference.spec import FP32_ROUNDOFF, Inputs, Outputs, Scheme

MASS_TOLERANCE = 4e-6
"""fp32's error of a cumulative probability: a token this close to top_p may be inside or outside the support."""


EDITED = ("logits", "repetition_penalty", "presence_penalty", "frequency_penalty") + (
    *("edit_offsets", "edit_ids", "edit_counts", "edit_bias"),
    "allowed",
)
"""The arguments that decide a row's logits."""


SCORE_ULPS = 16.0
"""fp32's error of a score, in roundoffs of each term: a subtraction, a division and two logarithms."""


@dataclass(frozen=True)
class Support:
    """The tokens that one row may draw, with their probabilities.  All tensors are (V,)."""

    probabilities: torch.Tensor
    """Probabilities of the draw in fp64, renormalised over `kept`; 0 elsewhere."""
    kept: torch.Tensor
    """True for each token of the support, by fp64 arithmetic."""
    doubtful: torch.Tensor
    """True for each token so near to top_p or min_p that fp32 may put the token on either side."""
    scores: torch.Tensor
    """The scores, logits / temperature, in fp64."""


def support(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Support:
    """Returns the support of one row's draw; temperature > 0.  logits: (V,).

    Tokens are ordered by probability descending, then index ascending. top_k keeps the first k tokens and renormalises.
    Of these, top_p keeps a token if the cumulative probability before it is below top_p, so the token that crosses
    top_p stays. min_p keeps tokens of at least min_p times the largest probability. A logit of -inf is never drawn.
    """
    scores = logits.detach().cpu().double() / temperature
    n = min(top_k or len(scores), int((scores > -math.inf).sum()))
    # Sorting only the first n of 128,256 values takes 2 to 5 ms, sorting all with their ids 12 ms (one EPYC core).
    ordered = torch.from_numpy(np.sort(np.partition(scores.numpy(), len(scores) - n)[len(scores) - n :])[::-1].copy())
    ranked = torch.exp(ordered[:n] - ordered[0])
    # With 2**n equal weights, every sum and quotient is exact in fp32, and there is no doubt.
    exact = bool((ranked == 1).all()) and n & (n - 1) == 0
    in_support = within = _first(scores, ordered, n)
    doubtful = torch.zeros_like(in_support)
    if top_p < 1:
        through = (ranked / ranked.sum()).cumsum(0)
        before = torch.cat([through.new_zeros(1), through[:-1]])
        in_support = _first(scores, ordered, int((before < top_p).sum()))
        if not exact:
            near = (int((before - top_p < limit).sum()) for limit in (-MASS_TOLERANCE, MASS_TOLERANCE))
            doubtful = torch.logical_xor(*(_first(scores, ordered, count) for count in near))
    gap = ordered[0] - scores
    weights = torch.exp(-gap)
    if min_p > 0:
        in_support = in_support & (weights >= min_p)
        if not exact:
            doubtful |= within & ((gap + math.log(min_p)).abs() <= SCORE_ULPS * FP32_ROUNDOFF * (gap + 1))
    law = torch.where(in_support, weights, 0.0)
    return Support(law / law.sum(), in_support, doubtful, scores)


def _first(scores: torch.Tensor, ordered: torch.Tensor, count: int) -> torch.Tensor:
    """Marks the first `count` tokens, (V,), by score descending, then index ascending; `ordered` has the scores."""
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    above, ties = scores > ordered[count - 1], scores == ordered[count - 1]
    return above | (ties & (ties.cumsum(0) <= count - above.sum()))


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
    """Returns the logits (B, V) in fp32 on the CPU after edits and mask; the arguments are as in `reference`.

    Every operation is rounded to fp32, so that each kernel has the same logits, and the same ties.
    """
    rows = logits.detach().cpu().float().numpy().copy()
    if edit_offsets is not None and edit_ids is not None and edit_counts is not None and edit_bias is not None:
        B = len(rows)
        once = np.ones(B, np.float32), np.zeros(B, np.float32), np.zeros(B, np.float32)
        tensors = (repetition_penalty, presence_penalty, frequency_penalty)
        penalties = [off if value is None else value.cpu().numpy() for value, off in zip(tensors, once, strict=True)]
        ends, ids, counts = edit_offsets.tolist(), edit_ids.tolist(), edit_counts.tolist()
        bias = edit_bias.cpu().numpy()
        for b in range(B):
            repetition, presence, frequency = (values[b] for values in penalties)
            for i in range(ends[b], ends[b + 1]):
                x = rows[b, ids[i]] + bias[i]
                if counts[i] >= 0:
                    x = x / repetition if x > 0 else x * repetition
                if counts[i] > 0:
                    x = x - (frequency * np.float32(counts[i]) + presence)
                rows[b, ids[i]] = x
    if allowed is not None:
        bits = np.unpackbits(allowed.cpu().contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
        rows[bits[:, : rows.shape[1]] == 0] = -math.inf
    return torch.from_numpy(rows)


def compare(actual: Outputs, oracle: Outputs, inputs: Inputs, scheme: Scheme) -> list[ErrorStats]:
    """A greedy token must equal the oracle's; a drawn token must be in the support and win the race.

    A token is in the support by fp64 arithmetic. Tokens within `MASS_TOLERANCE` of the support's edge count too, unless
    the row's arithmetic is exact. A token wins if its fp64 score is at most fp32's error of both scores below the best
    score of a token that is certainly in the support. With g = (best logit - logit) / T an fp32 score errs by at most
    `SCORE_ULPS` * 2**-24 * (|score| + g + |log E| + 1).
    """
    return _compare(actual, oracle, inputs, wins=True)


def compare_own_stream(actual: Outputs, oracle: Outputs, inputs: Inputs, scheme: Scheme) -> list[ErrorStats]:
    """Compares as `compare` does, but for a kernel with its own random stream.  A drawn token must be in the support,
    or as likely as a token in the support, because such kernels may cut the support by value."""
    return _compare(actual, oracle, inputs, wins=False)


def _compare(actual: Outputs, oracle: Outputs, inputs: Inputs, wins: bool) -> list[ErrorStats]:
    drawn, expected = actual[0], oracle[0].cpu()
    if drawn.shape != expected.shape or drawn.dtype != torch.int64:
        note = f"expected {tuple(expected.shape)} int64, got {tuple(drawn.shape)} {drawn.dtype}"
        bad = ErrorStats("tokens", False, math.nan, math.inf, expected.numel(), expected.numel(), note=note)
        return [bad, *_compare_logprobs(actual, oracle, inputs)]
    rows = edited(**{name: value for name, value in inputs.items() if name in EDITED})
    worst, worst_row, wrong, largest = 0.0, 0, 0, 0.0
    for b, (token, best) in enumerate(zip(drawn.tolist(), expected.tolist(), strict=True)):
        if token == best:
            continue
        error, ratio = _judge_row(token, best, rows[b], inputs, b, wins)
        wrong += not ratio <= 1
        if not ratio <= worst:
            worst, worst_row, largest = ratio, b, error
    tokens = ErrorStats("tokens", wrong == 0, largest, worst, wrong, expected.numel(), (worst_row,) if wrong else ())
    return [tokens, *_compare_logprobs(actual, oracle, inputs)]


def _compare_logprobs(actual: Outputs, oracle: Outputs, inputs: Inputs) -> list[ErrorStats]:
    """Compares ids and log-probabilities.  The drawn token's id is taken from the kernel; other ids are exact, because
    nothing is rounded before them.  The tolerance of a log-probability is the error of the sum plus that of a score."""
    if len(oracle) == 1:
        return []
    logits = inputs["logits"].detach().cpu().double()
    V = logits.shape[1]
    token_ids = torch.cat([actual[0].cpu()[:, None].clamp(0, V - 1), oracle[1].cpu()[:, 1:]], dim=1)
    likely = logits.log_softmax(-1).gather(1, token_ids)
    gap = (logits.max(-1, keepdim=True).values - logits.gather(1, token_ids)).nan_to_num(posinf=0.0)
    limit = MASS_TOLERANCE + SCORE_ULPS * FP32_ROUNDOFF * (gap + likely.abs().nan_to_num(posinf=0.0) + 1)
    ids = elementwise("logprob_ids", actual[1].cpu(), token_ids, torch.zeros_like(likely))
    return [ids, elementwise("logprobs", actual[2].cpu(), likely, limit)]


def _judge_row(token: int, best: int, row: torch.Tensor, inputs: Inputs, b: int, wins: bool) -> tuple[float, float]:
    """Returns the score of `best` minus that of `token`, and this difference divided by the allowed difference."""
    settings = [inputs[name][b].item() for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")]
    if not 0 <= token < len(row) or settings[0] == 0:
        return math.inf, math.inf
    if not wins:
        return (0.0, 0.0) if _tied_or_in_support(row, token, *settings[:4]) else (math.inf, math.inf)
    law = support(row, *settings[:4])
    if not bool(law.kept[token] | law.doubtful[token]):
        return math.inf, math.inf
    noise = race(settings[4], settings[5], len(row))
    scores = law.scores - noise
    certain = law.kept & ~law.doubtful
    if bool(certain.any()):
        best = int(scores.masked_fill(~certain, -math.inf).argmax())
    allowed = 0.0
    for i in (token, best):
        gap = float(law.scores.max() - law.scores[i])
        allowed += SCORE_ULPS * FP32_ROUNDOFF * (abs(float(law.scores[i])) + gap + abs(float(noise[i])) + 1)
    error = max(0.0, float(scores[best] - scores[token]))
    return error, error / allowed


def _tied_or_in_support(
    row: torch.Tensor, token: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> bool:
    """Returns whether `token` is in the row's support, with all ties at the edge of the support.  Nothing is sorted,
    because a kernel with its own stream draws another token in almost every row."""
    scores = row.double() / temperature
    above = scores > scores[token]
    weights = torch.exp(scores - scores.max())
    total = weights.topk(top_k).values.sum() if 0 < top_k < len(row) else weights.sum()
    return bool(
        (scores[token] > -math.inf)
        & (above.sum() < (top_k or len(row)))
        & (weights[above].sum() < (top_p + MASS_TOLERANCE) * total)
        & (weights[token] >= min_p * (1 - MASS_TOLERANCE))
    )

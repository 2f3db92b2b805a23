"""The kernel `prefilter`, for the CPU, sorts only the few tokens above a threshold.  A greedy row is one argmax."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.philox import log_exponential, words_of_rows, words_of_tokens
from rooflab.kernels.sample._args import EditTensor, check_rows, edited_rows
from rooflab.reference.sample import SPEC
from rooflab.reference.sample_rules import Edits

FIRST_GUESS_TOKENS = 256
"""The number of largest tokens that are tried for top_p first; else a bound is used that leaves more tokens."""


@kernel(
    backend="torch",
    devices=("cpu",),
    traffic=SPEC.least,
    over="naive",
    shows={
        "B=4,V=300,temperature=0.8,top_k=40,top_p=0.9,min_p=0.02": (
            'calls("naive").sorted_elements == 1200 > 2 * calls("prefilter").sorted_elements'
        )
    },
)
def prefilter(
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
    """Draws tokens on the CPU only.  The number of kept tokens decides the shapes of tensors, so on a GPU the host
    would wait for it.  Raises `ValueError` on a row without a finite largest logit."""
    logit_edits = Edits(**edits)
    if not logit_edits.tensors and not any(temperature.tolist()):
        torch.argmax(logits, dim=-1, out=tokens)
        check_rows(logits.gather(1, tokens[:, None])[:, 0])  # argmax takes a NaN for the largest value
    else:
        draw_rows(edited_rows(logits, logit_edits), (temperature, top_k, top_p, min_p), seed, position, tokens)
    if logprob_ids is not None and logprobs is not None:
        fill_logprobs(logits, tokens, logprob_ids, logprobs)


def draw_rows(
    rows: Iterator[Tensor], settings: tuple[Tensor, ...], seed: Tensor, position: Tensor, out: Tensor
) -> None:
    """Writes the drawn tokens to `out` (B,).  `settings` are the temperature, top_k, top_p and min_p of each row."""
    kept_tokens: list[tuple[int, Tensor, Tensor]] = []
    for b, (row, t, k, top_p, min_p) in enumerate(zip(rows, *(values.tolist() for values in settings), strict=True)):
        if t == 0:
            out[b] = row.argmax()
            check_rows(row[out[b]][None], (b,))
            continue
        row = row.float()
        best_logit = row.max()
        check_rows(best_logit[None], (b,))
        if k == 0 and top_p == 1 and min_p == 0:
            random_words = words_of_rows(seed[b : b + 1], position[b : b + 1], len(row))[0]
            out[b] = ((row - best_logit) / t).sub_(log_exponential(random_words)).argmax()
        else:
            kept_tokens.append((b, *_survivors(row, best_logit, t, k, top_p, min_p)))
    if kept_tokens:
        # All rows at once, because Philox on few tokens takes the time of its hundred calls, not of its arithmetic.
        row_numbers, tokens, scores = zip(*kept_tokens, strict=True)
        token_counts = [len(ids) for ids in tokens]
        row_id = torch.tensor(row_numbers).repeat_interleave(torch.tensor(token_counts))
        finals = torch.cat(scores) - log_exponential(words_of_tokens(seed[row_id], position[row_id], torch.cat(tokens)))
        for b, ids, row_scores in zip(row_numbers, tokens, torch.split(finals, token_counts), strict=True):
            out[b] = ids[row_scores.argmax()]


def fill_logprobs(logits: Tensor, tokens: Tensor, ids: Tensor, values: Tensor) -> None:
    """Fills `ids` and `values`, both `[B, 1 + n]`, with token ids and log-probabilities.  The drawn token comes first,
    then the n tokens with the largest logits.  Only tokens whose logit is at least the n-th largest are sorted."""
    top_n = ids.shape[1] - 1
    ids[:, 0] = tokens
    for b, row in enumerate(logits.float()):
        if top_n:
            candidate_ids = (row >= row.topk(top_n).values[-1]).nonzero().squeeze(1)
            ids[b, 1:] = candidate_ids[torch.sort(row[candidate_ids], descending=True, stable=True)[1][:top_n]]
        values[b] = row[ids[b]] - row.logsumexp(0)


def _survivors(
    row: Tensor, best: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Returns the tokens that top-k, top-p and min-p keep in one fp32 row of logits.  The first tensor holds their ids
    in ascending order.  The second holds `(logit - best) / temperature`, where `best` is the largest logit of the
    row."""
    row_mass = None
    if 0 < top_k < len(row):
        logit_threshold = row.topk(top_k).values[-1]
    elif top_p < 1:
        row_mass = ((row - best) / temperature).exp_().sum().double()
        logit_threshold = _top_p_threshold(row, best, row_mass, top_p, temperature)
    elif min_p:
        logit_threshold = best + temperature * (math.log(min_p) - 1e-3)  # a little too low: the ratio below decides
    else:
        logit_threshold = row.min()
    # Ties at the threshold stay; the stable sort keeps them in index order.
    ids = ((row >= logit_threshold) & (row > -math.inf)).nonzero().squeeze(1)
    values, sort_order = torch.sort(row[ids], descending=True, stable=True)
    ids = ids[sort_order]
    if top_k:
        ids, values = ids[:top_k], values[:top_k]
    scores = (values - best) / temperature
    token_mass = scores.exp().double()
    in_support = token_mass >= min_p
    if top_p < 1:
        in_support &= token_mass.cumsum(0) - token_mass < top_p * (token_mass.sum() if row_mass is None else row_mass)
    ids, sort_order = torch.sort(ids[in_support])
    return ids, scores[in_support][sort_order]


def _top_p_threshold(row: Tensor, best: Tensor, total: Tensor, top_p: float, temperature: float) -> Tensor:
    """Returns a lower limit for logits.  The tokens at or above it hold at least the share `top_p` of the row's softmax
    weight."""
    if len(row) > FIRST_GUESS_TOKENS:
        values = row.topk(FIRST_GUESS_TOKENS).values
        if ((values - best) / temperature).exp_().double().sum() >= top_p * total:
            return values[-1]
    # V tokens with less than (1 - top_p) * total / V each may all be cut; half of that leaves room for rounding.
    return best + temperature * torch.log((1 - top_p) * total / (2 * len(row))).float()

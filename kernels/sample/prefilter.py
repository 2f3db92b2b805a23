"""For the CPU: a threshold leaves few tokens to sort and to race, and a greedy row is one argmax."""

from __future__ import annotations

import math

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.registry import register
from rooflab.kernels.sample._args import check_args, traffic
from rooflab.kernels.sample._philox import first_word, first_word_of_row, log_exponential

FIRST_GUESS = 256
"""Tokens tried for top_p before a bound that leaves more tokens."""


@register(op="sample", name="prefilter", role="optimized", backend="torch", devices=("cpu",), traffic=traffic)
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids (B,) int64; settings are (B,) tensors; a row with temperature 0 is greedy.

    For the CPU only: the number of remaining tokens decides the shapes; on a GPU the host would wait for that number.
    Raises `ValueError` on wrong shapes, dtypes or settings.
    """
    check_args(logits, temperature, top_k, top_p, min_p, seed, position)
    out = output(out, (logits.shape[0],), logits, torch.int64)
    if not any(temperature.tolist()):
        return torch.argmax(logits, dim=-1, out=out)
    rows = zip(*(t.tolist() for t in (temperature, top_k, top_p, min_p, seed, position)), strict=True)
    few: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for b, (t, k, p, m, row_seed, row_position) in enumerate(rows):
        if t == 0:
            out[b] = logits[b].argmax()
        elif k == 0 and p == 1 and m == 0:
            row = logits[b].float()
            words = first_word_of_row(row_seed, row_position, torch.arange(len(row)))
            out[b] = ((row - row.max()) / t).sub_(log_exponential(words)).argmax()
        else:
            few.append((b, *_survivors(logits[b].float(), t, k, p, m)))
    if few:
        _race(few, seed, position, out)
    return out


def _survivors(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that one fp32 row may draw: ids in ascending order, and scores relative to the best."""
    best = row.max()
    total = None
    if 0 < top_k < len(row):
        threshold = row.topk(top_k).values[-1]
    elif top_p < 1:
        total = ((row - best) / temperature).exp_().sum().double()
        threshold = _top_p_threshold(row, best, total, top_p, temperature)
    elif min_p:
        threshold = best + temperature * (math.log(min_p) - 1e-3)  # a little too low: the ratio below decides
    else:
        threshold = row.min()
    # Ties at the threshold stay; the stable sort keeps them in index order.
    ids = ((row >= threshold) & (row > -math.inf)).nonzero().squeeze(1)
    values, order = torch.sort(row[ids], descending=True, stable=True)
    ids = ids[order]
    if top_k:
        ids, values = ids[:top_k], values[:top_k]
    scores = (values - best) / temperature
    mass = scores.exp().double()
    kept = mass >= min_p
    if top_p < 1:
        kept &= mass.cumsum(0) - mass < top_p * (mass.sum() if total is None else total)
    ids, order = torch.sort(ids[kept])
    return ids, scores[kept][order]


def _top_p_threshold(
    row: torch.Tensor, best: torch.Tensor, total: torch.Tensor, top_p: float, temperature: float
) -> torch.Tensor:
    """A value such that the tokens with at least this value hold top_p of the unnormalized mass `total`."""
    if len(row) > FIRST_GUESS:
        values = row.topk(FIRST_GUESS).values
        if ((values - best) / temperature).exp_().double().sum() >= top_p * total:
            return values[-1]
    # V tokens with less than (1 - top_p) * total / V each may all be cut; half of that leaves room for rounding.
    return best + temperature * torch.log((1 - top_p) * total / (2 * len(row))).float()


def _race(
    few: list[tuple[int, torch.Tensor, torch.Tensor]], seed: torch.Tensor, position: torch.Tensor, out: torch.Tensor
) -> None:
    """Draws for all rows at once, because Philox on few tokens costs its hundred calls, not its arithmetic."""
    sizes = [len(ids) for _, ids, _ in few]
    rows = torch.tensor([b for b, _, _ in few]).repeat_interleave(torch.tensor(sizes))
    words = first_word(seed[rows], position[rows], torch.cat([ids for _, ids, _ in few]))
    finals = torch.cat([scores for _, _, scores in few]) - log_exponential(words)
    for (b, ids, _), final in zip(few, torch.split(finals, sizes), strict=True):
        out[b] = ids[final.argmax()] if len(ids) else 0  # no token is left if all logits are -inf or NaN

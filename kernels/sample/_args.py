"""Edits logits (biases, penalties, mask) and computes log-probabilities, by calls of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from rooflab.reference.sample_rules import Edits

EditTensor = torch.Tensor | None


def check_rows(best: torch.Tensor, rows: Sequence[int] | None = None) -> None:
    """Raises `ValueError`, on the CPU, if a row's largest logit in `best` (n,) is not finite.  For a row with a NaN,
    the largest logit is NaN.  `rows` are the row numbers, by default 0 to n - 1."""
    if best.device.type == "cpu" and not bool(best.isfinite().all()):
        bad_row_index = int((~best.isfinite()).int().argmax())
        row = bad_row_index if rows is None else rows[bad_row_index]
        raise ValueError(f"logits: row {row}: expected a finite largest value, got {best[bad_row_index].item()}")


def edited(logits: torch.Tensor, edits: Edits) -> torch.Tensor:
    """Returns `logits` (B, V) in fp32 after edits and mask.  Each operation rounds to fp32."""
    x = logits.float()
    if not edits.tensors:
        return x
    x = x.clone() if x is logits else x
    rows, ids, values = _changes(logits, edits)
    x[rows, ids] = values
    return x if edits.allowed is None else x.masked_fill_(_barred(edits.allowed, x.shape[1]), -math.inf)


def edited_rows(logits: torch.Tensor, edits: Edits) -> Iterator[torch.Tensor]:
    """Yields the rows (V,) of `edited`, one by one.  One row stays in a CPU's cache, but a copy of all rows does not.
    A row without changes is not copied."""
    rows, ids, values = _changes(logits, edits)
    edit_counts = torch.bincount(rows, minlength=len(logits)).tolist()
    row_edits = zip(logits, torch.split(ids, edit_counts), torch.split(values, edit_counts), strict=True)
    for b, (row, row_ids, row_values) in enumerate(row_edits):
        x = row.float().index_copy(0, row_ids, row_values) if len(row_values) else row
        yield x if edits.allowed is None else x.float().masked_fill(_barred(edits.allowed[b], len(x)), -math.inf)


def _changes(logits: torch.Tensor, edits: Edits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the row, the token id and the new fp32 logit of each edited logit, as three tensors `[edits]`."""
    row_offsets, edit_ids, token_counts, bias = edits.edit_offsets, edits.edit_ids, edits.edit_counts, edits.edit_bias
    if row_offsets is None or edit_ids is None or token_counts is None or bias is None:
        empty_ids = torch.empty(0, dtype=torch.int64, device=logits.device)
        return empty_ids, empty_ids, empty_ids.float()
    all_rows = torch.arange(len(logits), device=logits.device)
    rows = torch.repeat_interleave(all_rows, row_offsets.diff(), output_size=len(edit_ids))
    values = logits[rows, edit_ids].float() + bias
    if edits.repetition_penalty is not None:
        token_penalty = edits.repetition_penalty[rows]
        penalized_logits = torch.where(values > 0, values / token_penalty, values * token_penalty)
        values = torch.where(token_counts >= 0, penalized_logits, values)
    penalty_sum = torch.zeros_like(values)
    if edits.frequency_penalty is not None:
        penalty_sum = edits.frequency_penalty[rows] * token_counts
    if edits.presence_penalty is not None:
        penalty_sum = penalty_sum + edits.presence_penalty[rows]
    return rows, edit_ids.long(), torch.where(token_counts > 0, values - penalty_sum, values)


def _barred(allowed: torch.Tensor, V: int) -> torch.Tensor:
    """Returns a mask `[..., V]`, true for each forbidden token.  The 32-bit words `allowed` hold one bit per token: 1
    if the token is allowed."""
    token_bits = allowed[..., None] >> torch.arange(32, dtype=torch.int32, device=allowed.device)
    return (token_bits & 1 == 0).flatten(-2)[..., :V]


def note_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor | None, values: torch.Tensor | None
) -> None:
    """Writes token ids and their log-probabilities to `ids` and `values` (B, 1 + n), unless they are None.  The drawn
    token comes first, then the n most likely tokens."""
    if ids is not None:
        sorted_ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True)[1]
        ids[:, 0], ids[:, 1:] = tokens, sorted_ids[:, : ids.shape[1] - 1]
        torch.gather(logits.float().log_softmax(-1), 1, ids, out=values)

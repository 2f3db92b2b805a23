"""What a user of torch writes: sort, cumulative sums, and torch.multinomial, which draws from torch's own stream."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.registry import register
from rooflab.kernels.sample._args import Drawn, Edit, check_args, check_rows, edited, note_logprobs, outputs
from rooflab.kernels.sample.naive import kept_of, traffic
from rooflab.reference.sample_rules import Edits


@register(
    op="sample", name="library", role="library", backend="torch", traffic=traffic,
    nondeterministic="torch.multinomial draws from torch's own stream, not by seed and position",
)  # fmt: skip
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor,
    out: Drawn | None = None, *,
    repetition_penalty: Edit = None, presence_penalty: Edit = None, frequency_penalty: Edit = None,
    edit_offsets: Edit = None, edit_ids: Edit = None, edit_counts: Edit = None, edit_bias: Edit = None,
    allowed: Edit = None, top_n: int | None = None,
) -> Drawn:  # fmt: skip
    """Token ids (B,) int64 by torch.sort and torch.multinomial; `seed` and `position` are not used.

    The arguments are those of `reference.sample.reference`.  Raises `ValueError` on wrong shapes or dtypes, and on the
    CPU on values out of range and rows without a law.
    """
    penalties = repetition_penalty, presence_penalty, frequency_penalty
    edits = Edits(*penalties, edit_offsets, edit_ids, edit_counts, edit_bias, allowed)
    check_args(logits, temperature, top_k, top_p, min_p, seed, position, edits, top_n)
    made = outputs(out, logits, top_n)
    if not len(logits):
        return note_logprobs(logits, made)
    ordered, order = torch.sort(edited(logits, edits), dim=-1, descending=True, stable=True)
    check_rows(ordered[:, 0])
    kept, scores = kept_of(ordered, temperature, top_k, top_p, min_p)
    kept[:, 1:] &= (temperature > 0)[:, None]
    drawn = torch.multinomial(scores.exp().mul_(kept), 1)
    torch.gather(order, 1, drawn, out=made[0][:, None])
    return note_logprobs(logits, made)

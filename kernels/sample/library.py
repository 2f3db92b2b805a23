"""What a user of torch writes: sort, cumulative sums, and torch.multinomial, which draws from torch's own stream."""

from __future__ import annotations

import torch

from rooflab.kernels.registry import register
from rooflab.kernels.sample._args import Drawn, Edits, check_args, check_rows, edited, note_logprobs, outputs
from rooflab.kernels.sample.naive import kept_of, traffic


@register(
    op="sample", name="library", role="library", backend="torch", traffic=traffic,
    nondeterministic="torch.multinomial draws from torch's own stream, not by seed and position",
)  # fmt: skip
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: Drawn | None = None,
    *,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    edit_offsets: torch.Tensor | None = None,
    edit_ids: torch.Tensor | None = None,
    edit_counts: torch.Tensor | None = None,
    edit_bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    top_n: int | None = None,
) -> Drawn:
    """Token ids (B,) int64 by torch.sort and torch.multinomial; `seed` and `position` are not used.

    The arguments are those of `reference.sample.reference`.  Raises `ValueError` on wrong shapes or dtypes, and on the
    CPU on values out of range and rows without a law.
    """
    edits = Edits(
        *(repetition_penalty, presence_penalty, frequency_penalty, edit_offsets, edit_ids, edit_counts, edit_bias),
        allowed,
    )
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

"""The kernel `library` samples as users of torch do: by a sort, cumulative sums, and torch.multinomial."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.sample._args import EditTensor, check_rows, edited, note_logprobs
from rooflab.kernels.sample.naive import support_of
from rooflab.reference.sample_rules import Edits


@kernel(backend="torch", nondeterministic="torch.multinomial draws from torch's own stream, not by seed and position")
def library(
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
    """Calls torch.sort and torch.multinomial; `seed` and `position` are not used.  On the CPU, raises `ValueError` on a
    row without a finite largest logit."""
    sorted_logits, sorted_ids = torch.sort(edited(logits, Edits(**edits)), dim=-1, descending=True, stable=True)
    check_rows(sorted_logits[:, 0])
    in_support, scores = support_of(sorted_logits, temperature, top_k, top_p, min_p)
    in_support[:, 1:] &= (temperature > 0)[:, None]
    drawn_rank = torch.multinomial(scores.exp().mul_(in_support), 1)
    torch.gather(sorted_ids, 1, drawn_rank, out=tokens[:, None])
    note_logprobs(logits, tokens, logprob_ids, logprobs)

"""Implements the kernel `naive`: calls the naive kernel of the op flash_attention for each sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rooflab.kernels._attention import get_scale
from rooflab.kernels.flash_attention.naive import attend
from rooflab.kernels.launcher import kernel


def spans(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> list[tuple[slice, slice]]:
    """Returns for each sequence the slice of its queries and the slice of its keys.  Waits for the device."""
    q_spans, k_spans = ([slice(*span) for span in pairwise(cu.tolist())] for cu in (cu_seqlens_q, cu_seqlens_k))
    return list(zip(q_spans, k_spans, strict=True))


@kernel(backend="torch")
def naive(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor | None, *,
    max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None, return_lse: bool,
) -> None:  # fmt: skip
    """Computes attention for one sequence after another.  Waits for the device to read the offsets."""
    scale = get_scale(q, softmax_scale)
    for q_span, k_span in spans(cu_seqlens_q, cu_seqlens_k):
        span_results = out[None, q_span], None if lse is None else lse[None, q_span]
        attend(q[None, q_span], k[None, k_span], v[None, k_span], *span_results, causal, scale, window, softcap, sinks)

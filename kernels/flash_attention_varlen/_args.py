"""What launchers of flash_attention_varlen share: bytes that they move, and what torch is told of the lengths."""

from __future__ import annotations

from torch import Tensor

from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2, or a CPU's cache, keeps a sequence's keys for its queries."""
    q = inputs.q
    lse = 4 * q.shape[0] * q.shape[1] if inputs.return_lse else 0
    read = nbytes(q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.sinks)
    return Traffic(read, nbytes(q) + lse)


def told_longest(q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> int:
    """The most queries of a sequence, for torch's FlashAttention-2: from 1 it would conclude that no sequence is empty,
    and view q by the number of sequences."""
    return max_seqlen_q if len(q) == len(cu_seqlens_q) - 1 else max(max_seqlen_q, 2)

"""torch's FlashAttention-2 with offsets if it takes the inputs, else scaled_dot_product_attention per sequence.

It calls the operator, not `torch.nn.attention.varlen`, whose signature changed in each release (2.10 to 2.12).
"""

from __future__ import annotations

import torch

from rooflab.kernels._attention import get_scale, never_zero
from rooflab.kernels.flash_attention.library import flash_attention as dense
from rooflab.kernels.flash_attention_varlen._args import check_args, told_longest
from rooflab.kernels.flash_attention_varlen.naive import spans
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.attention import check_options
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its queries."""
    q = inputs.q
    return Traffic(nbytes(q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k), nbytes(q))


def why_not_taken(q: torch.Tensor, window: int | None) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    if window is not None and not _has_flash(q):
        return "has a window only on CUDA, in fp16 and bf16"
    return None


def _has_flash(q: torch.Tensor) -> bool:
    """Whether FlashAttention-2 takes these queries: 16 bits, on CUDA, head_dim up to 256 in multiples of 8."""
    return q.device.type == "cuda" and q.dtype != torch.float32 and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0


@register(
    op="flash_attention_varlen", name="library", role="library", backend="torch",
    unsupported=lambda inputs: why_not_taken(inputs.q, inputs.window), traffic=traffic,
)  # fmt: skip
def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of each sequence.  q: (T, H, D); k, v: (S, H_kv, D); returns (T, H, D).

    torch allocates the result, so there is no `out`.  On the CPU, and in fp32, it reads the offsets.  Raises
    `ValueError` on wrong shapes or dtypes.
    """
    check_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_options(q, causal, window, None, None)
    reason = why_not_taken(q, window)
    if reason:
        raise ValueError(f"window: {reason}")
    if len(q) == 0 or len(k) == 0:
        return torch.zeros_like(q)
    if _has_flash(q):
        longest = told_longest(q, cu_seqlens_q, max_seqlen_q)
        answer = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, longest, max_seqlen_k, 0.0, causal, False,
            scale=never_zero(get_scale(q, softmax_scale)),
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )  # fmt: skip
        result: torch.Tensor = answer[0]
        return result
    parts = [
        dense(q[None, rows], k[None, keys], v[None, keys], causal, softmax_scale)[0]
        for rows, keys in spans(cu_seqlens_q, cu_seqlens_k)
    ]
    return torch.cat(parts)

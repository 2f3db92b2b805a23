"""torch's scaled_dot_product_attention with one named CUDA backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rooflab.kernels._attention import never_zero
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.registry import Arguments
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because a fused kernel keeps the scores on the chip."""
    q = inputs.q
    return Traffic(nbytes(q, inputs.k, inputs.v), nbytes(q))


def unsupported(inputs: Arguments) -> str | None:
    """Why no fused backend can take these inputs, or None."""
    return _why_not(inputs.q, inputs.k, inputs.causal)


def _why_not(q: torch.Tensor, k: torch.Tensor, causal: bool) -> str | None:
    if q.dtype == torch.float32:
        return "takes fp16 and bf16, got fp32"
    if causal and q.shape[1] != k.shape[1]:
        return f"has an upper-left causal mask, got {q.shape[1]} queries and {k.shape[1]} keys; library takes them"
    return None


def attend(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None
) -> torch.Tensor:
    """Attention by the backend with this name in `SDPBackend`, which raises `RuntimeError` if it refuses.

    Raises `ValueError` on wrong shapes or dtypes.
    """
    # Imported here, because it imports torch._dynamo, which would cost every command 1.4 s.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    check_args(q, k, v)
    reason = _why_not(q, k, causal)
    if reason:
        raise ValueError(f"q: {reason}")
    if q.numel() == 0 or k.shape[1] == 0:
        return torch.zeros_like(q)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        result = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            scale=never_zero(softmax_scale),
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return result.transpose(1, 2)

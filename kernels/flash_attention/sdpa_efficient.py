"""scaled_dot_product_attention with torch's memory-efficient backend (xFormers), even if torch would choose another."""

from __future__ import annotations

import torch

from rooflab.kernels.flash_attention import _sdpa
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.registry import Arguments, register


def unsupported(inputs: Arguments) -> str | None:
    """Why this backend cannot take these inputs, or None."""
    return _why_grouped(inputs.q, inputs.k) or _sdpa.unsupported(inputs)


def _why_grouped(q: torch.Tensor, k: torch.Tensor) -> str | None:
    if q.shape[2] == k.shape[2]:
        return None
    return f"k: expected q's {q.shape[2]} heads, as this backend takes no groups, got {k.shape[2]}"


@register(
    op="flash_attention", name="sdpa_efficient", role="peer", backend="torch", min_sm=80, devices=("cuda",),
    unsupported=unsupported, traffic=_sdpa.traffic,
)  # fmt: skip
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """Attention by torch's memory-efficient backend.  q: (B, T, H, D); k, v: (B, S, H, D); returns (B, T, H, D).

    torch allocates the result, so there is no `out`.  Raises `ValueError` on wrong shapes or dtypes, and
    `RuntimeError` if the backend refuses.
    """
    check_args(q, k, v)
    reason = _why_grouped(q, k)
    if reason:
        raise ValueError(reason)
    return _sdpa.attend("EFFICIENT_ATTENTION", q, k, v, causal, softmax_scale)

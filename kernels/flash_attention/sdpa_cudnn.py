"""scaled_dot_product_attention with cuDNN's fused attention, even if torch would choose another backend."""

from __future__ import annotations

import torch

from rooflab.kernels.flash_attention._sdpa import attend, traffic, unsupported
from rooflab.kernels.registry import register


@register(
    op="flash_attention", name="sdpa_cudnn", role="peer", backend="torch", min_sm=80, devices=("cuda",),
    unsupported=unsupported, traffic=traffic,
)  # fmt: skip
def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """Attention by cuDNN's fused attention.  q: (B, T, H, D); k, v: (B, S, H_kv, D); returns (B, T, H, D).

    torch allocates the result, so there is no `out`.  Raises `ValueError` on wrong shapes or dtypes, and
    `RuntimeError` if the backend refuses.
    """
    return attend("CUDNN_ATTENTION", q, k, v, causal, softmax_scale)

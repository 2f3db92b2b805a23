"""Wraps torch's scaled_dot_product_attention as comparison kernels, each with a fixed CUDA backend: cuDNN's fused
attention, the memory-efficient backend (xFormers), or torch's build of FlashAttention-2.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rooflab.kernels._attention import never_zero, traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES

EQUAL_LENGTHS_RULE = {"T == S or not causal": "as many queries as keys, as the causal mask is upper-left"}
peer = partial(
    kernel, role="peer", backend="torch", min_sm=80, devices=("cuda",), dtypes={"q": HALF_DTYPES}, traffic=traffic
)


def attend(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> Tensor:
    """Computes attention by the backend `backend` of torch's enum `SDPBackend`.  torch may raise `RuntimeError`."""
    # Imported here, because it imports torch._dynamo, which would cost every command 1.4 s.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if q.numel() == 0 or k.shape[1] == 0:
        return torch.zeros_like(q)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        attention_result = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            scale=never_zero(softmax_scale),
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return attention_result.transpose(1, 2)


@peer(holds=EQUAL_LENGTHS_RULE)
def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None) -> Tensor:
    """Computes attention by cuDNN's fused attention."""
    return attend("CUDNN_ATTENTION", q, k, v, causal, softmax_scale)


@peer(holds={**EQUAL_LENGTHS_RULE, "H_kv == H": "q's heads, as this backend takes no groups"})
def sdpa_efficient(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None) -> Tensor:
    """Computes attention by torch's memory-efficient backend.  This backend does not support grouped heads."""
    return attend("EFFICIENT_ATTENTION", q, k, v, causal, softmax_scale)


@peer(holds=EQUAL_LENGTHS_RULE)
def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None) -> Tensor:
    """Computes attention by torch's build of FlashAttention-2."""
    return attend("FLASH_ATTENTION", q, k, v, causal, softmax_scale)

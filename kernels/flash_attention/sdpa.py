"""torch's scaled_dot_product_attention with one named CUDA backend, even if torch would choose another: cuDNN's fused
attention, the memory-efficient one (xFormers), and torch's build of FlashAttention-2."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rooflab.kernels._attention import never_zero, traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALVES
from rooflab.reference.spec import Arguments


def why_not(inputs: Arguments, grouped: bool = True) -> str | None:
    """Why no fused backend, or none without `grouped` heads, can take these inputs, or None."""
    (_, T, H, _), (_, S, H_kv, _) = inputs.q.shape, inputs.k.shape
    if H != H_kv and not grouped:
        return f"k: expected q's {H} heads, as this backend takes no groups, got {H_kv}"
    if inputs.causal and T != S:
        sizes = f"{T} queries and {S} keys"
        return f"q: expected as many queries as keys, as the causal mask is upper-left, got {sizes}; library takes them"
    return None


peer = partial(
    kernel, role="peer", backend="torch", min_sm=80, devices=("cuda",), dtypes={"q": HALVES}, traffic=traffic
)


def attend(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> Tensor:
    """Attention by the backend with this name in `SDPBackend`, which raises `RuntimeError` if it refuses."""
    # Imported here, because it imports torch._dynamo, which would cost every command 1.4 s.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if q.numel() == 0 or k.shape[1] == 0:
        return torch.zeros_like(q)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        result = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal,
            scale=never_zero(softmax_scale), enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
    return result.transpose(1, 2)


@peer(unsupported=why_not)
def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None) -> Tensor:
    """cuDNN's fused attention."""
    return attend("CUDNN_ATTENTION", q, k, v, causal, softmax_scale)


@peer(unsupported=partial(why_not, grouped=False))
def sdpa_efficient(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None) -> Tensor:
    """The memory-efficient backend, which does not group heads."""
    return attend("EFFICIENT_ATTENTION", q, k, v, causal, softmax_scale)


@peer(unsupported=why_not)
def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None) -> Tensor:
    """torch's build of FlashAttention-2."""
    return attend("FLASH_ATTENTION", q, k, v, causal, softmax_scale)

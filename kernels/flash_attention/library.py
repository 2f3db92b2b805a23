"""Implements the kernel `library`: torch's scaled_dot_product_attention.  torch chooses FlashAttention-2, cuDNN or its
CPU kernel.  torch has no attention in fp8.  For fp8, the measured call first dequantizes q, k and v from e4m3 to bf16
in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rooflab.kernels import _device
from rooflab.kernels._attention import never_zero
from rooflab.kernels._device import kind_of
from rooflab.kernels.launcher import kernel
from rooflab.reference.flash_attention import E4M3


def _dequantized(x: Tensor, scale: Tensor | None) -> Tensor:
    """Multiplies fp8 values `x` `[B, T, H, D]` by the scale of each head, `[B, H]`.  The result is bf16, which
    represents every e4m3 value."""
    x_bf16 = x.to(torch.bfloat16, memory_format=torch.contiguous_format)
    return x_bf16 if scale is None else x_bf16.mul_(scale[:, None, :, None])


def _expands(q: Tensor, k: Tensor, device: str) -> bool:
    """Returns True if each key head is copied for every query head of its group.  This is so for grouped heads in fp32
    on CUDA: no fused backend supports them, and torch would write the scores to memory."""
    return q.dtype == torch.float32 and q.shape[2] != k.shape[2] and device == "cuda"


def _lower_right(T: int, S: int) -> Tensor | None:
    if _device.counted_device_type:  # on `meta`, where torch cannot make the bias; it has no memory
        return None
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo in 1.4 s

    return causal_lower_right(T, S)


def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> Tensor:
    """Calls scaled_dot_product_attention on q `[B, T, H, D]`, k and v `[B, S, H_kv, D]`.  The causal mask is aligned at
    the bottom right, so the last query sees all keys."""
    T, S = q.shape[1], k.shape[1]
    if S == 0 or T == 0:
        return torch.zeros_like(q)
    if causal and T > S:
        # The first T - S queries see no key, and torch's lower-right bias gives NaN for them; the rest is square.
        last_rows_output = call(q[:, T - S :], k, v, True, softmax_scale)
        return torch.cat((torch.zeros_like(q[:, : T - S]), last_rows_output), dim=1)
    if _expands(q, k, kind_of(q)):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    causal_bias = _lower_right(T, S) if causal and 1 < T < S else None
    attention_result = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=causal_bias,
        is_causal=causal and T == S,  # for T == S top-left and bottom-right masks are equal
        scale=never_zero(softmax_scale),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return attention_result.transpose(1, 2)


@kernel(backend="torch")
def library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """Computes attention by torch, which allocates the result.  There is no `out`, because a copy would take time."""
    if q.dtype == E4M3:
        q, k, v = (_dequantized(*x) for x in ((q, q_scale), (k, k_scale), (v, v_scale)))
    return call(q, k, v, causal, softmax_scale)

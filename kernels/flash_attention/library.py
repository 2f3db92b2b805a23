"""torch's scaled_dot_product_attention, which picks FlashAttention-2, cuDNN or its CPU kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.registry import register
from rooflab.roofline.model import Traffic


def traffic(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    device: str = "cuda",
) -> Traffic:
    """Each operand once: a fused kernel keeps the scores on the chip, and L2 serves the queries' repeated key reads.
    On CUDA in fp32 grouped keys and values are expanded first, which writes them and reads them again."""
    size = q.element_size()
    expanded = (k.numel() + v.numel()) * size * (q.shape[2] // k.shape[2]) if _expands(q, k, device) else 0
    read = (q.numel() + k.numel() + v.numel()) * size + expanded
    return Traffic(read, q.numel() * size + expanded, launches=3 if expanded else 1)


def _expands(q: torch.Tensor, k: torch.Tensor, device: str) -> bool:
    """Whether heads are expanded: on CUDA no fused backend takes both fp32 and grouped heads, and torch would
    materialise the scores."""
    return q.dtype == torch.float32 and q.shape[2] != k.shape[2] and device == "cuda"


def _lower_right(T: int, S: int) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: 1.4 s of every command

    return causal_lower_right(T, S)


@register(op="flash_attention", name="library", role="library", backend="torch", traffic=traffic)
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """scaled_dot_product_attention with a bottom-right causal mask.  q: (B, T, H, D); k, v: (B, S, H_kv, D).

    Takes no `out`: torch's call allocates, and a copy would be charged to it. Raises `ValueError` on shapes or dtypes
    that do not fit.
    """
    check_args(q, k, v)
    T, S = q.shape[1], k.shape[1]
    if S == 0 or T == 0:
        return torch.zeros_like(q)
    if causal and T > S:
        # The first T - S queries see no key, for which torch's lower-right bias gives NaN; the rest are square.
        tail = flash_attention(q[:, T - S :], k, v, True, softmax_scale)
        return torch.cat((torch.zeros_like(q[:, : T - S]), tail), dim=1)
    if _expands(q, k, q.device.type):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    bias = _lower_right(T, S) if causal and 1 < T < S else None
    result = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias,
        is_causal=causal and T == S,  # top-left and bottom-right are one where T == S
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return result.transpose(1, 2)

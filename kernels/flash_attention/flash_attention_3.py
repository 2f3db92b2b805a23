"""FlashAttention-3 (Shah et al., arXiv 2407.08608), its authors' package, if it is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from rooflab.kernels._attention import Returned
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.attention import check_options
from rooflab.reference.flash_attention import E4M3, check_scales
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

AUTHORS, FORWARD = "flash_attn_interface", "fa3_fwd_interface"
"""The module of the authors' package and of others that build all of it; and that of `fa3-fwd`, a wheel of the forward
pass alone, with the same functions."""
PACKAGE = FORWARD if find_spec(FORWARD) else AUTHORS


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its tiles of queries."""
    q = inputs.q
    lse = 4 * q.shape[0] * q.shape[1] * q.shape[2] if inputs.return_lse else 0
    # The result of fp8 is bf16.
    return Traffic(
        nbytes(q, inputs.k, inputs.v, inputs.q_scale, inputs.k_scale, inputs.v_scale),
        max(2, q.element_size()) * q.numel() + lse,
    )


def why_not_taken(q: torch.Tensor, k: torch.Tensor, q_scale: torch.Tensor | None) -> str | None:
    """Why the package cannot take these inputs, or None."""
    if q.dtype == torch.float32:
        return "takes fp16, bf16 and e4m3, got fp32"
    whole = 16 // q.element_size()
    if q.shape[-1] > 256 or q.shape[-1] % whole:
        return f"needs a head_dim of at most 256 in multiples of {whole}, got {q.shape[-1]}"
    group = q.shape[2] // k.shape[2]
    if q_scale is not None and group > 1 and q_scale.stride(1) != 0:
        return (
            f"q_scale: takes one scale for the {group} query heads of a group, which an expanded tensor (stride 0 over "
            f"heads) shows without a look at its values, got a stride of {q_scale.stride(1)}"
        )
    return None


@register(
    op="flash_attention", name="flash_attention_3", role="peer", backend="cuda", min_sm=90, devices=("cuda",),
    requires=(PACKAGE,), unsupported=lambda inputs: why_not_taken(inputs.q, inputs.k, inputs.q_scale), traffic=traffic,
)  # fmt: skip
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Returned:
    """`flash_attn_func`.  q: (B, T, H, D); k, v: (B, S, H_kv, D); returns (B, T, H, D).

    In e4m3 the scales (B, H) and (B, H_kv) are its descales, one per group of query heads, and the result is bf16.
    The package allocates the result, so there is no `out`; its log-sum-exp (B, H, T) is returned as a view (B, T, H).
    Raises `ValueError` on wrong shapes, dtypes or options.
    """
    check_args(q, k, v, fp8=True)
    check_options(q, causal, window, softcap, None)
    check_scales(q, k, q_scale, k_scale, v_scale)
    reason = why_not_taken(q, k, q_scale)
    if reason:
        raise ValueError(reason)
    library: Any = import_module(PACKAGE)
    result = library.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_sizes(window),
        softcap=softcap or 0.0,
        **_descales(q, k, q_scale, k_scale, v_scale),
        return_attn_probs=return_lse,
    )
    return (result[0], result[1].transpose(1, 2)) if return_lse else result


def _descales(q: torch.Tensor, k: torch.Tensor, *scales: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """The package's names for the scales, (B, H_kv) each; empty without fp8."""
    if q.dtype != E4M3:
        return {}
    queries, *others = scales
    queries = None if queries is None else queries[:, :: q.shape[2] // k.shape[2]]
    return dict(zip(("q_descale", "k_descale", "v_descale"), (queries, *others), strict=True))


def window_sizes(window: int | None) -> tuple[int, int]:
    """Keys to the left and to the right of a query's own position; -1 means all."""
    return (-1, -1) if window is None else (window - 1, 0)

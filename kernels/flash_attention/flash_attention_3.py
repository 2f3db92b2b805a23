"""Wraps the authors' package of FlashAttention-3 (Shah et al., arXiv 2407.08608) as a comparison kernel."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from rooflab.kernels._attention import AttentionResult, traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.flash_attention import E4M3

AUTHORS_PACKAGE, FA3_FWD_PACKAGE = "flash_attn_interface", "fa3_fwd_interface"
"""The module of the authors' package, which some other packages have too, and the module of `fa3-fwd`.  `fa3-fwd` is a
wheel of the forward pass alone, with the same functions."""
PACKAGE = FA3_FWD_PACKAGE if find_spec(FA3_FWD_PACKAGE) else AUTHORS_PACKAGE


def _descales(q: Tensor, k: Tensor, *scales: Tensor | None) -> dict[str, Tensor | None]:
    """Returns the scales of q, k and v as FlashAttention-3's keyword arguments, each `[B, H_kv]`.  Returns an empty
    dict if q is not fp8."""
    if q.dtype != E4M3:
        return {}
    q_scales, *kv_scales = scales
    q_scales = None if q_scales is None else q_scales[:, :: q.shape[2] // k.shape[2]]
    return dict(zip(("q_descale", "k_descale", "v_descale"), (q_scales, *kv_scales), strict=True))


def window_sizes(window: int | None) -> tuple[int, int]:
    """Returns how many keys a query sees before and after its own position.  -1 means all keys."""
    return (-1, -1) if window is None else (window - 1, 0)


@kernel(
    role="peer",
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=(PACKAGE,),
    dtypes={"q": (*HALF_DTYPES, E4M3)},
    limits={"D": range(0, 257, 8)},
    traffic=traffic,
    holds={
        "D % 16 == 0 or itemsize > 1": "D in multiples of 16 in fp8",
        "q_scale is None or H == H_kv or q_scale[1] == 0": (
            "one scale for the query heads of a group, which an expanded tensor (stride 0 over heads) shows without a "
            "look at its values"
        ),
    },
)
def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    return_lse: bool,
) -> AttentionResult:
    """Calls `flash_attn_func`, which allocates the result.  Changes its log-sum-exp from `[B, H, T]` to `[B, T, H]`."""
    fa3_package: Any = import_module(PACKAGE)
    attention_result = fa3_package.flash_attn_func(
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
    return (attention_result[0], attention_result[1].transpose(1, 2)) if return_lse else attention_result

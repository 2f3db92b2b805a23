"""Wraps FlashInfer's prefill (Ye et al., arXiv 2501.01005) as a comparison kernel. Needs the package
`flashinfer-python`.

A single sequence goes to `single_prefill_with_kv_cache`. Several sequences go to
`BatchPrefillWithRaggedKVCacheWrapper`, and so does a causal sequence with more queries than keys. FlashInfer's plan
(the division of the work) is made once per shape. A time measured after a warm-up does not contain the plan. Another
launch changes the log-sum-exp from base 2 to base e.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels import _flashinfer as adapter
from rooflab.kernels._attention import AttentionResult, traffic, unseen
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments


@lru_cache(maxsize=4)
def _planned(
    device: torch.device,
    lengths: tuple[int, int, int],
    heads: tuple[int, int, int],
    causal: bool,
    options: tuple[tuple[str, Any], ...],
) -> adapter.FlashInferPlan:
    """Makes FlashInfer's plan for sequences of equal length, and caches it.  `lengths` is `(B, T, S)`.  `heads` is `(H,
    H_kv, D)`."""
    B, T, S = lengths
    option_values = dict(options)
    prefill_wrapper = adapter.make_wrapper(
        "BatchPrefillWithRaggedKVCacheWrapper", device, option_values["q_data_type"], heads[2], "NHD"
    )
    offset_pair = (torch.arange(B + 1) * T).int(), (torch.arange(B + 1) * S).int()
    return adapter.plan_ragged(prefill_wrapper, offset_pair, heads, causal, device, option_values)


@kernel(
    role="peer",
    backend="cuda",
    min_sm=80,
    devices=("cuda",),
    requires=(adapter.PACKAGE,),
    dtypes={"q": HALF_DTYPES},
    limits={"D": adapter.HEAD_DIMS},
    whole={"q": -1, "k": -1, "v": -1},
    holds={
        "q[0] == T * q[1] or B <= 1 or T <= 1": "sequences one after another in memory",
        "k[0] == S * k[1] or B <= 1 or S <= 1": "sequences one after another in memory",
        "v == k or B * S == 0": "the strides of k",
    },
    traffic=adapter.with_base_e(traffic),
)
def flashinfer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    return_lse: bool,
) -> AttentionResult:
    """Calls FlashInfer's prefill, which allocates the result, because it cannot write to an `out` with row gaps."""
    B, T, H, _ = q.shape
    S = k.shape[1]
    if not B * T * S:
        return unseen(q, return_lse)
    plan_options = adapter.plan_options(Arguments(q=q, softmax_scale=softmax_scale, window=window, softcap=softcap))
    no_key_rows = None
    if B == 1 and not (causal and T > S):
        del plan_options["q_data_type"], plan_options["kv_data_type"]
        prefill_function = import_module(adapter.PACKAGE).single_prefill_with_kv_cache
        attention_result = prefill_function(q[0], k[0], v[0], causal=causal, return_lse=return_lse, **plan_options)
    else:
        plan = _planned(q.device, (B, T, S), (H, k.shape[2], q.shape[-1]), causal, tuple(plan_options.items()))
        attention_result = plan.wrapper.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), return_lse=return_lse)
        no_key_rows = plan.unseeing
    output = adapter.finished(attention_result, no_key_rows)
    return (output[0].view(q.shape), output[1].view(B, T, H)) if isinstance(output, tuple) else output.view(q.shape)

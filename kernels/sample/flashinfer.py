"""Calls FlashInfer's sampling (package `flashinfer-python`), which draws in rounds of rejection and does not sort.

With top-k, the call is `top_k_top_p_sampling_from_logits`, which is faster if all rows have the same k.  Without top-k,
the call is `top_p_sampling_from_probs`.  FlashInfer keeps all ties: a token stays if it is as probable as the last
token that top-k or top-p keeps (read in versions 0.6.18 and 0.7.2).
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from rooflab.kernels._flashinfer import PACKAGE
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Returns the memory traffic of a call.  It counts the division of the logits by the temperature, and the first
    round of sampling.  If no row has top-k, it also counts a softmax."""
    n, rows = inputs.logits.numel(), 24 * len(inputs.logits)
    passes = 1 if any(inputs.top_k.tolist()) else 2
    return Traffic(n * (inputs.logits.element_size() + 4 * passes) + rows, 4 * n * passes + rows, launches=2 + passes)


def why_not(inputs: Arguments) -> str | None:
    """Returns why FlashInfer cannot take these inputs, or None.  The host waits for the device to read the settings."""
    if not inputs.temperature.is_meta and not bool((inputs.temperature > 0).all()):
        return "temperature: expected values > 0 in all rows, got 0"
    if not inputs.min_p.is_meta and bool(inputs.min_p.any()):
        return "min_p: expected 0 in all rows, got more, which FlashInfer takes without top-k and top-p alone"
    return None


def plan_of(inputs: Arguments) -> int | Tensor:
    """Returns top-k: one number if all rows agree, else int32 (B,).  Rows without top-k have the vocabulary size."""
    V = inputs.logits.shape[1]
    top_k = torch.where(inputs.top_k > 0, inputs.top_k, V).clamp(max=V)
    top_k_values = set(top_k.tolist())
    return top_k_values.pop() if len(top_k_values) == 1 else top_k


@kernel(
    role="peer",
    backend="cuda",
    min_sm=80,
    devices=("cuda",),
    requires=(PACKAGE,),
    unsupported=why_not,
    traffic=traffic,
    plan=plan_of,
    nondeterministic="FlashInfer draws from torch's own stream, not by seed and position",
)
def flashinfer(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    plan: int | Tensor | None,
) -> Tensor:
    """Returns token ids (B,) int64.  Ignores `seed` and `position`.  Without `plan`, the host reads the settings, and
    so waits for the device.  It then raises `ValueError` on rows that FlashInfer cannot take.  FlashInfer writes int32,
    so there is no `out`."""
    if plan is None:
        op_arguments = Arguments(logits=logits, temperature=temperature, top_k=top_k, min_p=min_p)
        if refusal_text := why_not(op_arguments):
            raise ValueError(refusal_text)
        plan = plan_of(op_arguments)
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    module = import_module(PACKAGE)
    token_ids: Tensor
    new_logits = logits.float() / temperature[:, None]
    if isinstance(plan, int) and plan == logits.shape[1]:
        token_ids = module.top_p_sampling_from_probs(new_logits.softmax(-1), top_p)
    else:
        token_ids = module.top_k_top_p_sampling_from_logits(new_logits, plan, top_p, filter_apply_order="top_k_first")
    return token_ids.long()

"""Wraps `torch.nn.attention.varlen.varlen_attn` as a comparison kernel.

torch runs its FlashAttention-2, or another kernel that the caller activated by `activate_flash_attention_impl`.  The
function's arguments differ between releases: 2.11 has windows, 2.12 also `block_table`.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._attention import AttentionResult, get_scale, unseen
from rooflab.kernels._attention import traffic as moved_once
from rooflab.kernels.flash_attention.flash_attention_3 import window_sizes
from rooflab.kernels.flash_attention_varlen.library import longest_queries
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic

MODULE = "torch.nn.attention.varlen"
CAUSAL_WINDOW = (-1, 0)
"""The window that stands for a causal mask aligned at the bottom right, in torch."""


@cache
def parameters() -> frozenset[str]:
    """Returns the argument names of torch's `varlen_attn`, or an empty set if this torch has no such function."""
    if importlib.util.find_spec(MODULE) is None:
        return frozenset()
    # Imported here, because it imports torch._dynamo, which would cost every command 1.4 s.
    return frozenset(inspect.signature(import_module(MODULE).varlen_attn).parameters)


def why_lacking(*needed: str) -> str | None:
    """Returns an error message if this torch's `varlen_attn` lacks one of the arguments `needed`, else None."""
    missing_names = [parameter_name for parameter_name in needed if parameter_name not in parameters()]
    return f"torch {torch.__version__} has no varlen_attn with {missing_names[0]}" if missing_names else None


def call(q: Tensor, k: Tensor, v: Tensor, *where: Any, return_lse: bool, **options: Any) -> AttentionResult:
    """Calls `varlen_attn`.  Returns its log-sum-exp as `[T, H]`, with -inf instead of inf for queries without keys."""
    varlen_module: Any = import_module(MODULE)
    if "enable_gqa" in parameters():  # older releases take grouped heads without this option
        options["enable_gqa"] = q.shape[1] != k.shape[-2]
    if return_lse:
        options["return_aux"] = varlen_module.AuxRequest(lse=True)
    attention_result = varlen_module.varlen_attn(q, k, v, *where, **options)
    if not return_lse:
        out: Tensor = attention_result
        return out
    out, lse = attention_result
    return out, lse.masked_fill(lse == math.inf, -math.inf).mT


def traffic(inputs: Arguments) -> Traffic:
    """Returns the bytes that a call moves.  Counts each operand once, because L2 keeps a sequence's keys for its
    queries.  torch always writes a log-sum-exp.  With `return_lse`, two more launches correct the log-sum-exp."""
    operand_traffic = moved_once(inputs.but(return_lse=True))
    if not inputs.return_lse:
        return operand_traffic
    lse = 4 * inputs.q.shape[0] * inputs.q.shape[1]
    mask_bytes = lse // 4
    return Traffic(
        operand_traffic.read_bytes + 2 * lse + mask_bytes, operand_traffic.write_bytes + lse + mask_bytes, launches=3
    )


@kernel(
    role="peer",
    backend="torch",
    min_sm=80,
    devices=("cuda",),
    dtypes={"q": HALF_DTYPES},
    limits={"D": range(0, 257, 8)},
    traffic=traffic,
)
def torch_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    return_lse: bool,
) -> AttentionResult:
    """Calls `varlen_attn`, which allocates the result."""
    if len(q) == 0 or len(k) == 0:
        return unseen(q, return_lse)
    sequence_args = (cu_seqlens_q, cu_seqlens_k, longest_queries(q, cu_seqlens_q, max_seqlen_q), max_seqlen_k)
    window_size = CAUSAL_WINDOW if causal and window is None else window_sizes(window)
    score_scale = get_scale(q, softmax_scale)
    return call(q, k, v, *sequence_args, return_lse=return_lse, scale=score_scale, window_size=window_size)

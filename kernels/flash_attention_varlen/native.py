"""Implements `native`, for the CPU, in C++: FlashAttention with tiles in registers and cache.  Skips masked tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._attention import get_scale, traffic
from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.launcher import kernel
from rooflab.reference.flash_attention_varlen import check_lengths
from rooflab.reference.spec import Arguments

SOURCE = Path(__file__).with_suffix(".cpp")


def shape(of: Arguments) -> Any:
    """Returns the sizes, strides, options and number of threads, as the array that the C++ function takes."""
    _, H, D = of.q.shape
    return sizes(
        len(of.cu_seqlens_q) - 1, H, of.k.shape[1], D, torch.get_num_threads(), *of.q.stride()[:2],
        *of.out.stride()[:2], *of.k.stride()[:2], *of.v.stride()[:2], 0, 0, 1, 0, of.causal, of.window or 0,
    )  # fmt: skip


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=traffic,
    bind=shape,
    over="naive",
    shows={"": ('calls("naive").total >= 10 and calls("native").names.keys() <= {"empty", "empty_like"}')},
)
def native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    bound: Any,
) -> None:
    """Computes attention of all sequences in a single C++ call."""
    max_lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    check_lengths(
        {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **max_lengths}, {"T": len(q), "S": len(k)}
    )
    data_pointers = (tensor.data_ptr() for tensor in (q, k, v, out, cu_seqlens_q, cu_seqlens_k))
    built(SOURCE, "ipppppppf")(DTYPE_CODES[q.dtype], *data_pointers, bound, get_scale(q, softmax_scale))

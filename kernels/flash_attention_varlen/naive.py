"""flash_attention's naive kernel for one sequence at a time."""

from __future__ import annotations

import torch

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels.flash_attention.naive import flash_attention as dense
from rooflab.kernels.flash_attention.naive import traffic as dense_traffic
from rooflab.kernels.flash_attention_varlen._args import check_args
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.attention import check_options
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The traffic of flash_attention/naive, for each sequence."""
    q, k, v, cu_seqlens_q = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q
    unscaled = {"q_scale": None, "k_scale": None, "v_scale": None}  # only the dense op has these arguments
    parts = [
        dense_traffic(inputs.but(q=q[None, rows], k=k[None, keys], v=v[None, keys], **unscaled))
        for rows, keys in spans(cu_seqlens_q, inputs.cu_seqlens_k)
    ]
    return Traffic(
        sum(part.read_bytes for part in parts) + 8 * len(cu_seqlens_q),
        sum(part.write_bytes for part in parts),
        launches=max(1, sum(part.launches for part in parts)),
    )


def spans(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> list[tuple[slice, slice]]:
    """The queries and the keys of each sequence; waits for the device."""
    rows, keys = ([slice(*pair) for pair in zip(cu, cu[1:], strict=False)] for cu in _lists(cu_seqlens_q, cu_seqlens_k))
    return list(zip(rows, keys, strict=True))


def _lists(*offsets: torch.Tensor) -> list[list[int]]:
    return [cu.tolist() for cu in offsets]


@register(op="flash_attention_varlen", name="naive", role="naive", backend="torch", traffic=traffic)
def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    out: Returned | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Returned:
    """flash_attention/naive of each sequence.  q: (T, H, D); k, v: (S, H_kv, D); returns (T, H, D).

    Waits for the device to read the offsets.  Raises `ValueError` on wrong shapes, dtypes or options.
    """
    check_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_options(q, causal, window, softcap, sinks)
    result, lse = outputs(out, tuple(q.shape), q, return_lse)
    for rows, keys in spans(cu_seqlens_q, cu_seqlens_k):
        own = result[None, rows] if lse is None else (result[None, rows], lse[None, rows])
        dense(
            q[None, rows], k[None, keys], v[None, keys], causal, softmax_scale, out=own, window=window,
            softcap=softcap, sinks=sinks, return_lse=return_lse,
        )  # fmt: skip
    return result if lse is None else (result, lse)

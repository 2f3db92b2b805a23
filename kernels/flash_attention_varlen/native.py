"""For the CPU, in C++: FlashAttention's tiles in registers and cache; a tile that the mask hides is not computed."""

from __future__ import annotations

from pathlib import Path

import torch

from rooflab.kernels._attention import get_scale
from rooflab.kernels._checks import output
from rooflab.kernels._native import DTYPES, built, check_on_cpu, sizes
from rooflab.kernels.flash_attention_varlen._args import check_args
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.attention import check_options
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

SOURCE = Path(__file__).with_suffix(".cpp")


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once: a sequence's keys stay in cache for its queries."""
    q = inputs.q
    return Traffic(nbytes(q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k), nbytes(q))


@register(
    op="flash_attention_varlen", name="native", role="optimized", backend="cpp", devices=("cpu",), traffic=traffic
)
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
    out: torch.Tensor | None = None,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of each sequence.  q: (T, H, D); k, v: (S, H_kv, D); returns (T, H, D).

    Raises `ValueError` on wrong shapes or dtypes.
    """
    check_on_cpu(q, k, v, cu_seqlens_q, cu_seqlens_k, out)
    check_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_options(q, causal, window, None, None)
    out = output(out, tuple(q.shape), q)
    T, H, D = q.shape
    if T == 0:
        return out
    shape = sizes(
        len(cu_seqlens_q) - 1, H, k.shape[1], D, torch.get_num_threads(), *q.stride()[:2], *out.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], 0, 0, 1, 0, causal, window or 0,
    )  # fmt: skip
    pointers = (x.data_ptr() for x in (q, k, v, out, cu_seqlens_q, cu_seqlens_k))
    built(SOURCE, "ipppppppf")(DTYPES[q.dtype], *pointers, shape, get_scale(q, softmax_scale))
    return out

"""Checks of the arguments of all flash_attention_varlen kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, check_float, check_last_dim_contiguous, checks_bounds
from rooflab.reference.flash_attention_varlen import check_lengths, check_operands
from rooflab.reference.rules import check_dtype


def check_args(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Raises `ValueError` unless q is (T, H, D), k and v (S, H_kv, D) of one dtype, offsets (B + 1,) int32, all on one
    device, and the lengths at least 0.

    Offsets must begin at 0, never fall, end at T and S, and differ by at most the longest lengths.  This is checked on
    the CPU; on a GPU only with `_checks.CHECK_VALUES`, because it waits for the GPU.  Without the check, kernels leave
    a row of no sequence undefined, as FlashAttention and torch do.
    """
    check_float("q", q)
    check_operands(q, k, v, cu_seqlens_q, cu_seqlens_k)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_last_dim_contiguous(name, tensor)
    for name, offsets, end, longest in (
        ("cu_seqlens_q", cu_seqlens_q, len(q), max_seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, len(k), max_seqlen_k),
    ):
        check_dtype(name, offsets, torch.int32)
        check_contiguous(name, offsets)
        if longest < 0:
            raise ValueError(f"max_seqlen_{name[-1]}: expected at least 0, got {longest}")
        if checks_bounds(offsets):
            check_lengths(name, offsets, end, longest)
    others = {"k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, tensor in others.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")


def told_longest(q: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int) -> int:
    """The most queries of a sequence, for torch's FlashAttention-2: from 1 it would conclude that no sequence is empty,
    and view q by the number of sequences."""
    return max_seqlen_q if len(q) == len(cu_seqlens_q) - 1 else max(max_seqlen_q, 2)

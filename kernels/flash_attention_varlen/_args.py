"""Checks of the arguments of all flash_attention_varlen kernels."""

from __future__ import annotations

import torch

from rooflab.kernels import _checks
from rooflab.kernels._checks import check_contiguous, check_dtype, check_float, check_last_dim_contiguous, check_shape


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
    check_shape("q", q, None, None, None)
    T, H, D = q.shape
    check_shape("k", k, None, None, D)
    check_shape("v", v, *k.shape)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, tensor, q.dtype)
        check_last_dim_contiguous(name, tensor)
    check_shape("cu_seqlens_q", cu_seqlens_q, None)
    check_shape("cu_seqlens_k", cu_seqlens_k, len(cu_seqlens_q))
    if len(cu_seqlens_q) == 0:
        raise ValueError("cu_seqlens_q: expected at least the offset 0, got none")
    for name, offsets, end, longest in (
        ("cu_seqlens_q", cu_seqlens_q, T, max_seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k),
    ):
        check_dtype(name, offsets, torch.int32)
        check_contiguous(name, offsets)
        if longest < 0:
            raise ValueError(f"max_seqlen_{name[-1]}: expected at least 0, got {longest}")
        if offsets.device.type == "cpu" or _checks.CHECK_VALUES:
            _check_offsets(name, offsets.tolist(), end, longest)
    others = {"k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, tensor in others.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")
    if k.shape[1] == 0 or H % k.shape[1]:
        raise ValueError(f"k: expected a number of heads that divides q's {H}, got {k.shape[1]}")


def _check_offsets(name: str, offsets: list[int], end: int, longest: int) -> None:
    lengths = [after - before for before, after in zip(offsets, offsets[1:], strict=False)]
    if offsets[0] != 0 or offsets[-1] != end or min(lengths, default=0) < 0:
        raise ValueError(f"{name}: expected offsets from 0 to {end} that never fall, got {offsets}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"max_seqlen_{name[-1]}: expected at least {max(lengths)}, the longest, got {longest}")


def told_longest(q: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int) -> int:
    """The most queries of a sequence, for torch's FlashAttention-2: from 1 it would conclude that no sequence is empty,
    and view q by the number of sequences."""
    return max_seqlen_q if len(q) == len(cu_seqlens_q) - 1 else max(max_seqlen_q, 2)

"""Checks of the arguments of all paged_attention kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, check_float, check_last_dim_contiguous
from rooflab.kernels._paged_values import check_pages
from rooflab.kernels.registry import Arguments
from rooflab.reference.attention import check_options
from rooflab.reference.rules import check_dtype, check_shape


def check_args(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """Raises `ValueError` unless q is (T, H, D), the caches (num_blocks, block_size, H_kv, D) of its dtype, block_table
    (B, max_blocks) int32, seq_lens (B,) int32 and cu_seqlens_q (B + 1,) int32 (without it T = B), all on one device;
    with scales (H_kv,) fp32 the caches are e4m3.  Tables and lengths are checked as `_paged_values` says; with
    `window` only the pages that it leaves, for a kernel that reads no other.
    """
    check_float("q", q)
    check_shape("q", q, None, None, None)
    T, H, D = q.shape
    check_shape("k_cache", k_cache, None, None, None, D)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_shape("seq_lens", seq_lens, T if cu_seqlens_q is None else None)
    if T and not len(seq_lens):
        raise ValueError(f"seq_lens: expected a sequence for q's {T} queries, got none")
    check_shape("block_table", block_table, len(seq_lens), None)
    ints = {"block_table": block_table, "seq_lens": seq_lens}
    if cu_seqlens_q is not None:
        check_shape("cu_seqlens_q", cu_seqlens_q, len(seq_lens) + 1)
        check_contiguous("cu_seqlens_q", cu_seqlens_q)
        ints["cu_seqlens_q"] = cu_seqlens_q
    for name, tensor in ints.items():
        check_dtype(name, tensor, torch.int32)
    check_contiguous("seq_lens", seq_lens)
    check_last_dim_contiguous("q", q)
    check_last_dim_contiguous("block_table", block_table)
    others = {"k_cache": k_cache, "v_cache": v_cache, **ints}
    for name, cache, scale in (("k_cache", k_cache, k_scale), ("v_cache", v_cache, v_scale)):
        check_dtype(name, cache, q.dtype if scale is None else torch.float8_e4m3fn)
        check_last_dim_contiguous(name, cache)
        if scale is not None:
            check_shape(f"{name[0]}_scale", scale, k_cache.shape[2])
            check_dtype(f"{name[0]}_scale", scale, torch.float32)
            check_contiguous(f"{name[0]}_scale", scale)
            others[f"{name[0]}_scale"] = scale
    for name, tensor in others.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")
    H_kv = k_cache.shape[2]
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"k_cache: expected a number of heads that divides q's {H}, got {H_kv}")
    check_pages(block_table, seq_lens, k_cache.shape[0], k_cache.shape[1], T, cu_seqlens_q, window)


def seen_spans(inputs: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key that a sequence's queries see, and one past their last, (B,) each; a traffic model's, not a
    launch's."""
    lengths = inputs.seq_lens.long()
    counts = torch.ones_like(lengths) if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.long().diff()
    first = torch.zeros_like(lengths) if inputs.window is None else (lengths - counts + 1 - inputs.window).clamp(min=0)
    return first, torch.where(counts > 0, lengths, 0)


def check_paged_options(q: torch.Tensor, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
    """Raises `ValueError` as `check_options` does, and on sinks that are not contiguous."""
    check_options(q, True, window, softcap, sinks)
    if sinks is not None:
        check_contiguous("sinks", sinks)

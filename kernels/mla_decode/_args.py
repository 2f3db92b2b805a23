"""Checks of the arguments of all mla_decode kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, check_last_dim_contiguous
from rooflab.kernels._paged_values import check_pages
from rooflab.reference import mla_decode
from rooflab.reference.rules import check_dtype


def check_args(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, latent_dim: int
) -> None:
    """Raises `ValueError` unless q is (B, H, D) in fp16 or bf16, kv_cache (num_blocks, block_size, D) of its dtype,
    block_table (B, max_blocks) int32 and seq_lens (B,) int32, all on one device, and 1 <= latent_dim <= D."""
    check_dtype("q", q, torch.float16, torch.bfloat16)
    mla_decode.check_args(q, kv_cache, block_table, seq_lens, latent_dim)
    check_dtype("kv_cache", kv_cache, q.dtype)
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens)):
        check_dtype(name, tensor, torch.int32)
    check_contiguous("seq_lens", seq_lens)
    for name, tensor in (("q", q), ("kv_cache", kv_cache), ("block_table", block_table)):
        check_last_dim_contiguous(name, tensor)
    for name, tensor in (("kv_cache", kv_cache), ("block_table", block_table), ("seq_lens", seq_lens)):
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")
    check_pages(block_table, seq_lens, kv_cache.shape[0], kv_cache.shape[1], len(q))

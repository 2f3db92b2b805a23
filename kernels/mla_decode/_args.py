"""Checks of the arguments of all mla_decode kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, check_dtype, check_last_dim_contiguous, check_shape
from rooflab.kernels._paged_values import check_pages


def check_args(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, latent_dim: int
) -> None:
    """Raises `ValueError` unless q is (B, H, D) in fp16 or bf16, kv_cache (num_blocks, block_size, D) of its dtype,
    block_table (B, max_blocks) int32 and seq_lens (B,) int32, all on one device, and 1 <= latent_dim <= D."""
    check_dtype("q", q, torch.float16, torch.bfloat16)
    check_shape("q", q, None, None, None)
    B, _, D = q.shape
    check_shape("kv_cache", kv_cache, None, None, D)
    check_dtype("kv_cache", kv_cache, q.dtype)
    check_shape("block_table", block_table, B, None)
    check_shape("seq_lens", seq_lens, B)
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens)):
        check_dtype(name, tensor, torch.int32)
    check_contiguous("seq_lens", seq_lens)
    for name, tensor in (("q", q), ("kv_cache", kv_cache), ("block_table", block_table)):
        check_last_dim_contiguous(name, tensor)
    if not 1 <= latent_dim <= D:
        raise ValueError(f"latent_dim: expected 1 to {D}, q's last dimension, got {latent_dim}")
    for name, tensor in (("kv_cache", kv_cache), ("block_table", block_table), ("seq_lens", seq_lens)):
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")
    check_pages(block_table, seq_lens, kv_cache.shape[0], kv_cache.shape[1], B)

"""Guards that every paged_attention launcher shares."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_contiguous, check_dtype, check_float, check_last_dim_contiguous, check_shape


def check_args(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Raises `ValueError` on tensors that are not q (B, H, D), caches (num_blocks, block_size, H_kv, D) of its dtype,
    block_table (B, max_blocks) int32 and seq_lens (B,) int32, all on one device.

    Values are not checked: on a GPU that would wait for it.
    """
    check_float("q", q)
    check_shape("q", q, None, None, None)
    B, H, D = q.shape
    check_shape("k_cache", k_cache, None, None, None, D)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_shape("block_table", block_table, B, None)
    check_shape("seq_lens", seq_lens, B)
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_contiguous("seq_lens", seq_lens)
    check_last_dim_contiguous("q", q)
    check_last_dim_contiguous("block_table", block_table)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, cache, q.dtype)
        check_last_dim_contiguous(name, cache)
    others = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    for name, tensor in others.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {tensor.device}")
    H_kv = k_cache.shape[2]
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"k_cache: expected a number of heads that divides q's {H}, got {H_kv}")


def get_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """`softmax_scale`, or head_dim**-0.5 for None."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale

"""Wrong kernels that use other strides than their arguments have, or write over an input too early."""

from __future__ import annotations

import torch

from .entries import Kind
from .parts import close, memory, normed, read

strides = Kind(__name__, "strides")
in_place = Kind(__name__, "in place")


@strides("softmax")
def out_rows_close_together(x, out=None):
    """Rows of the result are stored one behind the other, also where `out` is a part of wider rows."""
    rows = x.float().softmax(-1).to(x.dtype)
    out = torch.empty_like(rows) if out is None else out
    memory(out)[: rows.numel()] = rows.flatten()
    return out


strides.changes(
    {
        # The stride between rows is taken to be H, also in a view of wider rows.
        "rmsnorm/rows_of_a_view": lambda of: {"x": close(of.x)},
        # A view that begins inside its storage is read from the storage's first element.
        "rmsnorm/offset_in_storage": lambda of: {"x": of.x.as_strided(of.x.shape, of.x.stride(), 0)},
        # One stride serves x and the residual.
        "fused_add_rmsnorm/residual_by_the_stride_of_x": lambda of: {"residual": read(of.residual, *of.x.stride())},
        # `x.stride(0) or width`: the stride 0 of expanded rows counts as none.
        "silu_and_mul/stride_or_width": lambda of: {"x": read(of.x, of.x.stride(0) or of.x.shape[1], 1)},
        # A is read as a whole matrix, row-major or transposed, and not as a part of one with longer rows.
        "gemm/leading_dimension_is_k": lambda of: {"a": close(of.a.mT).mT if of.a.stride(0) == 1 else close(of.a)},
        # A b that is contiguous in no direction is read one row off.
        "gemm/no_stride_of_b_is_1": lambda of: {} if 1 in of.b.stride() else {"b": of.b.roll(1, 0)},
        # The block scales of A are read as stored by columns, also where they are stored by rows.
        "gemm_fp8/scales_by_columns": lambda of: {"a_scale": close(of.a_scale.mT).mT} if of.a_scale.ndim == 2 else {},
        # An expert's matrix is looked for K * N values behind the last one's.
        "gemm_grouped/experts_close_together": lambda of: {"b": read(of.b, of.b[0].numel(), *of.b.stride()[1:])},
        # Scales are read as (N, groups) in rows, also where a checkpoint's (groups, N) was transposed.
        "gemm_w4a16/scales_in_rows": lambda of: {"scale": close(of.scale)},
        # New values are read at the strides of the new keys.
        "kv_cache_write/v_by_the_strides_of_k": lambda of: {"v": read(of.v, *of.k.stride())},
        # Heads are taken to be D apart, also where a head's rotated part is a view of a longer one.
        "rope/heads_close_together": lambda of: {
            name: read(x, x.stride(0), x.shape[2], 1) for name, x in (("q", of.q), ("k", of.k))
        },
        # Rows of logits are taken to be V apart, also where the vocabulary is padded.
        "sample/vocabulary_without_padding": lambda of: {"logits": close(of.logits)},
        # Log-sum-exps are read as (P, T, H) in rows, also where they were stored as (P, H, T).
        "merge_attention_states/lses_in_the_order_of_outs": lambda of: {"lses": close(of.lses)},
        # The block table is read as if its rows had no padding; a page outside of the cache is another one.
        "mla_decode/table_without_padding": lambda of: {
            "block_table": close(of.block_table).clamp(0, len(of.kv_cache) - 1)
        },
        # A page is looked for by its size, also where pages of keys and of values alternate in one tensor.
        "paged_attention/pages_close_together": lambda of: {"k_cache": close(of.k_cache), "v_cache": close(of.v_cache)},
        # The next sequence's keys are looked for S tokens on, also in a cache with room for more.
        "flash_attention/batches_follow_each_other": lambda of: {
            name: read(x, x.shape[1] * x.stride(1), *x.stride()[1:]) for name, x in (("k", of.k), ("v", of.v))
        },
        # Where the table begins in its storage is not read, so a shard of a larger table is the first shard.
        "embedding/table_at_the_start_of_its_storage": lambda of: {
            "weight": of.weight.as_strided(of.weight.shape, of.weight.stride(), 0)
        },
    }
)


@in_place("rope")
def halves_in_place(q, k, cos, sin, positions, interleaved=False, out=None):
    """The first halves are stored before the second are computed, which is too early if `out` is q and k."""
    out = (torch.empty_like(q), torch.empty_like(k)) if out is None else out
    c, s = cos[positions][:, None], sin[positions][:, None]
    for x, y in zip((q, k), out, strict=True):
        (a, b), (a_out, b_out) = ((z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, -1) for z in (x, y))
        a_out.copy_(a.float() * c - b.float() * s)
        b_out.copy_(b.float() * c + a.float() * s)
    return out


@in_place("fused_add_rmsnorm")
def residual_in_place(x, residual, weight, eps=1e-6, *, weight_offset=0.0):
    """The sum is written over the residual, which the caller may still need."""
    residual += x
    return normed(residual, weight, eps, weight_offset).to(x.dtype), residual

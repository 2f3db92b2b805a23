"""Wrong kernels that read or write at other strides than their arguments have, or over an input too early."""

from __future__ import annotations

import torch

from .entries import Kind
from .parts import memory, normed, read

strides = Kind(__name__, "strides")
in_place = Kind(__name__, "in place")


@strides("softmax")
def out_rows_close_together(x, out=None):
    """Rows of the result are stored one behind the other, also where `out` is a part of wider rows."""
    rows = x.float().softmax(-1).to(x.dtype)
    out = torch.empty_like(rows) if out is None else out
    memory(out)[: rows.numel()] = rows.flatten()
    return out


@strides.changed("gemm")
def leading_dimension_is_k(of):
    """A is read as a whole matrix, row-major or transposed, and not as a part of one with longer rows."""
    M, K = of.a.shape
    return {"a": read(of.a, (M, K), (1, M) if of.a.stride(0) == 1 else (K, 1))}


@strides.changed("gemm_fp8")
def scales_by_columns(of):
    """The block scales of A are read as stored by columns, also where they are stored by rows."""
    return {"a_scale": read(of.a_scale, of.a_scale.shape, (1, len(of.a)))} if of.a_scale.ndim == 2 else {}


@strides.changed("gemm_grouped")
def experts_close_together(of):
    """An expert's matrix is looked for K * N values behind the last one's."""
    _, K, N = of.b.shape
    return {"b": read(of.b, of.b.shape, (K * N, *of.b.stride()[1:]))}


@strides.changed("rope")
def heads_close_together(of):
    """Heads are taken to be D apart, also where a head's rotated part is a view of a longer one."""
    return {name: read(x, x.shape, (x.stride(0), x.shape[2], 1)) for name, x in (("q", of.q), ("k", of.k))}


@strides.changed("merge_attention_states")
def lses_in_the_order_of_outs(of):
    """Log-sum-exps are read as (P, T, H) in rows, also where they were stored as (P, H, T)."""
    P, T, H = of.lses.shape
    return {"lses": read(of.lses, (P, T, H), (T * H, H, 1))}


@strides.changed("paged_attention")
def pages_close_together(of):
    """A page is looked for by its size, also where pages of keys and of values alternate in one tensor."""
    _, size, H_kv, D = of.k_cache.shape
    close = (size * H_kv * D, H_kv * D, D, 1)
    return {name: read(x, x.shape, close) for name, x in (("k_cache", of.k_cache), ("v_cache", of.v_cache))}


@strides.changed("flash_attention")
def batches_follow_each_other(of):
    """The next sequence's keys are looked for S tokens on, also in a cache with room for more."""
    return {
        name: read(x, x.shape, (x.shape[1] * x.stride(1), *x.stride()[1:])) for name, x in (("k", of.k), ("v", of.v))
    }


strides.changes({
    # The stride between rows is taken to be H, also in a view of wider rows.
    "rmsnorm/rows_of_a_view": lambda of: {"x": read(of.x, of.x.shape, (of.x.shape[1], 1))},
    # A view that begins inside its storage is read from the storage's first element.
    "rmsnorm/offset_in_storage": lambda of: {"x": of.x.as_strided(of.x.shape, of.x.stride(), 0)},
    # One stride serves x and the residual.
    "fused_add_rmsnorm/residual_by_the_stride_of_x": lambda of: {
        "residual": read(of.residual, of.x.shape, of.x.stride())
    },
    # `x.stride(0) or width`: the stride 0 of expanded rows counts as none.
    "silu_and_mul/stride_or_width": lambda of: {"x": read(of.x, of.x.shape, (of.x.stride(0) or of.x.shape[1], 1))},
    # A b that is contiguous in no direction is read one row off.
    "gemm/no_stride_of_b_is_1": lambda of: {} if 1 in of.b.stride() else {"b": of.b.roll(1, 0)},
    # Scales are read as (N, groups) in rows, also where a checkpoint's (groups, N) was transposed.
    "gemm_w4a16/scales_in_rows": lambda of: {"scale": read(of.scale, of.scale.shape, (of.scale.shape[1], 1))},
    # New values are read at the strides of the new keys.
    "kv_cache_write/v_by_the_strides_of_k": lambda of: {"v": read(of.v, of.v.shape, of.k.stride())},
    # Rows of logits are taken to be V apart, also where the vocabulary is padded.
    "sample/vocabulary_without_padding": lambda of: {
        "logits": read(of.logits, of.logits.shape, (of.logits.shape[1], 1))
    },
    # The block table is read as if its rows had no padding; a page outside of the cache is another one.
    "mla_decode/table_without_padding": lambda of: {
        "block_table": read(of.block_table, of.block_table.shape, (of.block_table.shape[1], 1)).clamp(
            0, len(of.kv_cache) - 1
        )
    },
    # Where the table begins in its storage is not read, so a shard of a larger table is the first shard.
    "embedding/table_at_the_start_of_its_storage": lambda of: {
        "weight": of.weight.as_strided(of.weight.shape, of.weight.stride(), 0)
    },
})  # fmt: skip


@in_place("fused_add_rmsnorm")
def normed_before_the_sum(x, residual, weight, eps=1e-6, out=None, *, weight_offset=0.0):
    """The normed rows are stored first, and then x is read again, which may be the same memory."""
    first, total = (torch.empty(x.shape, dtype=x.dtype) for _ in range(2)) if out is None else out
    first.copy_(normed(x + residual, weight, eps, weight_offset))
    return first, torch.add(x, residual, out=total)


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

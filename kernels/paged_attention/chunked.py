"""Over gqa_packed: chunks of queries, bounded by `cu_seqlens_q`, and sequences with one query, in one launch.

A tile is BLOCK_M rows of one sequence and KV head; a row is a query with one of the group's heads.  So a loaded key
serves all heads, and even a chunk of few queries fills a tensor core's rows (gqa_packed packs only heads; prefill in
chunks: Agrawal et al., "SARATHI", 2023).  The grid is an upper bound from T, B and the tile; a program finds its
sequence in cu_seqlens_q by bisection, so the host does not wait for the device.  The last tiles, which see the most
keys, come first.

Tried, predicted, not built: docs/notes/paged_attention.md.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import get_scale, strides_of
from rooflab.kernels._attention_configs import Config, padded
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import LN2, LOG2E, capped
from rooflab.kernels.paged_attention._args import traffic
from rooflab.kernels.paged_attention._configs import CHUNKED, tiles_at_most
from rooflab.reference.spec import Arguments


@triton.jit
def _first_query(cu_ptr, b):
    """First query of sequence b; without bounds each sequence has one query."""
    return tl.load(cu_ptr + b) if cu_ptr is not None else b


@triton.jit
def _sequence_of(tile, cu_ptr, B, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last sequence whose first tile is at or before `tile`; tiles of sequence b begin at rows / BLOCK_M + b."""
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        behind = _first_query(cu_ptr, middle) * GROUP // BLOCK_M + middle > tile
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle)
    return low


@triton.jit
def _pages(table_ptr, start, length, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of a step's keys; entries past the end are not read."""
    keys = start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < length, other=0)


@triton.jit
def _steps(
    acc, m_i, l_i, q, first, end, positions, length, k_ptr, v_ptr, table_ptr, scale, window, cap, k_stride_block,
    k_stride_slot, v_stride_block, v_stride_slot,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys `first` to `end` in steps of BLOCK_N; positions: (BLOCK_M,), the position of each row among the keys."""
    dims = tl.arange(0, HEAD_PAD)
    there = dims < HEAD_DIM
    page = _pages(table_ptr, first, length, BLOCK_SIZE, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # int64, because page * stride and slot * stride pass 2**31 elements in a cache of 4 GiB.
        block = page.to(tl.int64)
        page = _pages(table_ptr, start + BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
        slot = (keys % BLOCK_SIZE).to(tl.int64)
        k_offsets = (block * k_stride_block + slot * k_stride_slot)[None, :] + dims[:, None]
        v_offsets = (block * v_stride_block + slot * v_stride_slot)[:, None] + dims[None, :]
        # Keys and values are masked too: a page's unused slots may hold NaN, and 0 * NaN is NaN.
        if MASKED:
            k_mask = (keys < length)[None, :] & there[:, None]
            v_mask = (keys < length)[:, None] & there[None, :]
            k = tl.load(k_ptr + k_offsets, mask=k_mask, other=0.0).to(q.dtype)
            v = tl.load(v_ptr + v_offsets, mask=v_mask, other=0.0).to(q.dtype)
        elif HEAD_PAD != HEAD_DIM:
            k = tl.load(k_ptr + k_offsets, mask=there[:, None], other=0.0).to(q.dtype)
            v = tl.load(v_ptr + v_offsets, mask=there[None, :], other=0.0).to(q.dtype)
        else:
            k = tl.load(k_ptr + k_offsets).to(q.dtype)
            v = tl.load(v_ptr + v_offsets).to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            scores = capped(scores, cap) * LOG2E
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        # m_i of a row that has seen no key is -inf, and -inf - -inf would be NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(m_i - shift)
        l_i = l_i * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")
        m_i = m_new
    return acc, m_i, l_i


# Arguments that change from batch to batch are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["B", "tiles", "window", "table_stride"])
def chunked_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, B, H_kv,
    tiles, scale, window, cap, q_stride_t, q_stride_h, k_stride_block, k_stride_slot, k_stride_h, v_stride_block,
    v_stride_slot, v_stride_h, table_stride, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head = (tl.program_id(0) % H_kv).to(tl.int64)
    tile = tiles - 1 - tl.program_id(0) // H_kv
    b = _sequence_of(tile, cu_ptr, B, GROUP, BLOCK_M)
    first_query = _first_query(cu_ptr, b)
    queries = _first_query(cu_ptr, b + 1) - first_query
    first_row = (tile - first_query * GROUP // BLOCK_M - b) * BLOCK_M
    if first_row >= queries * GROUP:
        return
    length = tl.load(lens_ptr + b)
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    mask = rows < queries * GROUP
    positions = length - queries + rows // GROUP
    token = (first_query + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    both = mask[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = token * q_stride_t + head * q_stride_h
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=both, other=0.0)
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + kv_head)

    # All rows see the keys before `plain` (with a window not those before `near`); some rows see `first` and `end - 1`.
    last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, queries - 1)
    end = length - queries + last_query + 1
    # Steps begin at the first visible key, anywhere in a page: earlier pages may have been freed.
    first = 0
    near = 0
    if WINDOW:
        first = tl.maximum(length - queries + first_row // GROUP + 1 - window, 0)
        near = first + tl.cdiv(tl.maximum(end - window - first, 0), BLOCK_N) * BLOCK_N
    plain = first + tl.maximum(length - queries + first_row // GROUP + 1 - first, 0) // BLOCK_N * BLOCK_N
    near = tl.minimum(near, plain)
    k_ptr += kv_head * k_stride_h
    v_ptr += kv_head * v_stride_h
    table_ptr += b.to(tl.int64) * table_stride
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_PAD), tl.float32)
    ends = (first, near, plain, end)
    for part in tl.static_range(0 if WINDOW else 1, 3):  # of three ranges of keys the middle one needs no mask
        acc, m_i, l_i = _steps(
            acc, m_i, l_i, q, ends[part], ends[part + 1], positions, length, k_ptr, v_ptr, table_ptr, scale, window,
            cap, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            part != 1, WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, HEAD_PAD, BLOCK_N,
        )  # fmt: skip

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=mask, other=float("-inf")) * LOG2E
        most = tl.maximum(m_i, sink)
        shift = tl.where(most == float("-inf"), 0.0, most)
        l_i = l_i * tl.exp2(m_i - shift) + tl.exp2(sink - shift)
        acc = acc * tl.exp2(m_i - shift)[:, None]
        m_i = most
    over = 1 / tl.where(l_i == 0.0, 1.0, l_i)
    if v_scale_ptr is not None:
        over = over * tl.load(v_scale_ptr + kv_head)
    out_offsets = token * out_stride_t + head * out_stride_h
    tl.store(
        out_ptr + out_offsets[:, None] + dims[None, :], (acc * over[:, None]).to(out_ptr.dtype.element_ty), mask=both
    )
    if lse_ptr is not None:
        lse = (m_i + tl.log2(tl.where(l_i == 0.0, 1.0, l_i))) * LN2
        lse = tl.where(l_i == 0.0, float("-inf"), lse)
        tl.store(lse_ptr + token * lse_stride_t + head * lse_stride_h, lse, mask=mask)


def launch(of: Arguments) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """A CTA for each tile that there may be of each head of keys; sizes and strides; constants."""
    (T, H, D), B, (_, block_size, H_kv, _) = of.q.shape, len(of.seq_lens), of.k_cache.shape
    tiles = tiles_at_most(T, B, H // H_kv, of.config.block_m)
    scale = get_scale(of.q, of.softmax_scale) * (1.0 if of.softcap else LOG2E.value)
    # A window of more keys than a table has room for hides nothing; the device uses 32 bits.
    window = min(of.window or 0, of.block_table.shape[1] * block_size)
    numbers = (
        B, H_kv, tiles, scale, window, of.softcap or 0.0,
        *of.q.stride()[:2], *of.k_cache.stride()[:3], *of.v_cache.stride()[:3], of.block_table.stride(0),
        *of.out.stride()[:2], *strides_of(of.lse, 2),
    )  # fmt: skip
    constants = {
        "WINDOW": of.window is not None, "SOFTCAP": of.softcap is not None, "BLOCK_SIZE": block_size,
        "GROUP": H // H_kv, "HEAD_DIM": D, "HEAD_PAD": max(padded(D), 16), **of.config.launch_arguments,
    }  # fmt: skip
    return tiles * H_kv, numbers, constants


@kernel(
    backend="triton", limits={"D": range(1, 257)}, traffic=traffic, bind=launch, tuning=CHUNKED,
    fenced_since="3.7.1",
    over="gqa_packed", shows={
        "B=1,context=65536,H=32,H_kv=8,D=128,block_size=16,ragged=false": (
            "below.mma > below.wgmma == 0 and mma > 0 and shared_bytes > below.shared_bytes"
        ),
        "B=4,context=4096,H=32,H_kv=8,D=128,block_size=16,ragged=false,queries=512": (
            "launched == 1 and stack_bytes == 0 and [loop.wgmma for loop in products] == [12, 12]; "
            "products[0].cp_async > 0 and products[0].length < 0.9 * products[1].length"
        ),
    },
)  # fmt: skip
def chunked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, *,
    softmax_scale: float | None, cu_seqlens_q: Tensor | None, window: int | None, softcap: float | None,
    sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, return_lse: bool, config: Config,
    bound: Any,
) -> None:  # fmt: skip
    """Any block_size; each cache may be e4m3.  Does not wait for the device."""
    ctas, numbers, constants = bound
    chunked_kernel[(ctas,)](
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale, out, lse, *numbers,
        **constants,
    )  # fmt: skip

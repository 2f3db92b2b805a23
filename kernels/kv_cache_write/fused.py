"""The kernel `fused` improves on `naive`: one launch writes k and v of each token that has a slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.reference.kv_cache_write import SPEC

NUM_WARPS = 4
TILE_VALUES = 1024
"""The number of values of k, and of v, that a program copies: eight for each of 128 threads."""


@triton.jit
def _kv_cache_write(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    num_slots,
    num_kv_heads,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    # Offsets are int64: slot * H_kv * D passes 2**31 in a bf16 cache of 4 GiB, and head * stride in a long prefill
    # whose heads are far apart.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    # A slot past the cache is skipped too, so the kernel never writes outside the cache.
    if (slot >= 0) & (slot < num_slots):
        head_ids = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]).to(tl.int64)
        columns = tl.arange(0, BLOCK_D)[None, :]
        value_mask = (head_ids < num_kv_heads) & (columns < D)
        k = tl.load(k_ptr + token * stride_kt + head_ids * stride_kh + columns, mask=value_mask)
        v = tl.load(v_ptr + token * stride_vt + head_ids * stride_vh + columns, mask=value_mask)
        target_offsets = slot * num_kv_heads * D + head_ids * D + columns
        tl.store(k_cache_ptr + target_offsets, k, mask=value_mask)
        tl.store(v_cache_ptr + target_offsets, v, mask=value_mask)


@kernel(
    backend="triton",
    traffic=SPEC.least,
    limits={"D": 16384},
    over="naive",
    shows={"": 'calls("naive").total >= 6 and launched == 1; STG_E_128 == global_store == 2'},
)
def fused(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes `k` and `v` to their slots.  Skips a token with a negative slot, or with a slot past the cache."""
    T, H_kv, D = k.shape
    block_d = next_power_of_2(D)
    block_heads = min(next_power_of_2(H_kv), max(TILE_VALUES // block_d, 1))
    _kv_cache_write[(T, cdiv(H_kv, block_heads))](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k_cache.shape[0] * k_cache.shape[1],
        H_kv,
        *k.stride()[:2],
        *v.stride()[:2],
        D=D,
        BLOCK_D=block_d,
        BLOCK_HEADS=block_heads,
        num_warps=NUM_WARPS,
    )

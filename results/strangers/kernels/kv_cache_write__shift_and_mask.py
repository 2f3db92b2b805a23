"""WRONG.  Page and offset of a slot are found by a shift and a mask, as if a page had a power of two of slots.  16,
32 and 64 are right.  With pages of 24 or 48 slots (a page size made to fit another layer's state) tokens go to
wrong slots."""

import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def write(k, v, k_cache, v_cache, slots, k_t, k_h, v_t, v_h, page, width, D, bits, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < width
            head, column = at // D, at % D
            place = (slot >> bits) * page + (slot & ((1 << bits) - 1)) * width + at
            tl.store(k_cache + place, tl.load(k + token * k_t + head * k_h + column, mask), mask)
            tl.store(v_cache + place, tl.load(v + token * v_t + head * v_h + column, mask), mask)


@register(op="kv_cache_write", name="shift_and_mask", role="optimized", backend="triton")
def kv_cache_write(k, v, k_cache, v_cache, slot_mapping):
    T, H, D = k.shape
    block_size = k_cache.shape[1]
    if k.numel():
        bits = (block_size - 1).bit_length()
        write[(T,)](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping.contiguous(),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_cache.stride(0),
            H * D,
            D,
            bits,
            BLOCK=128,
        )

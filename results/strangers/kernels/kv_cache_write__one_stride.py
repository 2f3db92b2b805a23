"""WRONG.  v is read with the strides of k.  They are the same when both are contiguous, or both are slices of
q|k|v.  When k is a fresh tensor (after a rotary embedding) and v is a slice, v's tokens are read from wrong places.
"""

import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def write(k, v, k_cache, v_cache, slots, token_stride, head_stride, H, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    at = tl.arange(0, BLOCK)
    source = token * token_stride + head * head_stride + at
    target = (slot * H + head) * D + at
    tl.store(k_cache + target, tl.load(k + source, at < D), at < D)
    tl.store(v_cache + target, tl.load(v + source, at < D), at < D)


@register(op="kv_cache_write", name="one_stride", role="optimized", backend="triton")
def kv_cache_write(k, v, k_cache, v_cache, slot_mapping):
    T, H, D = k.shape
    if k.numel():
        slots = slot_mapping.contiguous()
        write[(T, H)](k, v, k_cache, v_cache, slots, k.stride(0), k.stride(1), H, D, triton.next_power_of_2(D))

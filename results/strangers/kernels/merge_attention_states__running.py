"""RIGHT.  One pass over the parts, the last part first, with a running maximum, sum and output, as an online
softmax does.  Log-sum-exps of +inf and -inf are parts without keys, and their outputs are not used.  Any strides
are right."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def merge(outs, lses, out, lse, P, H, D, o_p, o_t, o_h, l_p, l_t, l_h, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) // H
    head = tl.program_id(0).to(tl.int64) % H
    at = tl.arange(0, BLOCK)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    merged = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, P):
        p = tl.cast(P - 1 - step, tl.int64)
        each = tl.load(lses + p * l_p + token * l_t + head * l_h)
        if tl.abs(each) != float("inf"):
            higher = tl.maximum(peak, each)
            keep = tl.exp(peak - higher)
            weight = tl.exp(each - higher)
            value = tl.load(outs + p * o_p + token * o_t + head * o_h + at, at < D, 0.0).to(tl.float32)
            merged = merged * keep + weight * value
            total = total * keep + weight
            peak = higher
    row = token * H + head
    empty = total == 0
    tl.store(out + row * D + at, merged / tl.where(empty, 1.0, total), at < D)
    tl.store(lse + row, tl.where(empty, float("-inf"), peak + tl.log(tl.where(empty, 1.0, total))))


@register(op="merge_attention_states", name="running", role="optimized", backend="triton")
def merge_attention_states(outs, lses):
    P, T, H, D = outs.shape
    out = torch.empty((T, H, D), dtype=outs.dtype, device=outs.device)
    lse = torch.empty((T, H), dtype=torch.float32, device=outs.device)
    if out.numel():
        strides = (*outs.stride()[:3], *lses.stride())
        merge[(T * H,)](outs, lses, out, lse, P, H, D, *strides, BLOCK=triton.next_power_of_2(D))
    return out, lse

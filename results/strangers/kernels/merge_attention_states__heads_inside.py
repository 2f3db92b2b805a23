"""WRONG.  The log-sum-exp of token t and head h of part p is read at (p T + t) H + h, as in a contiguous (P, T,
H).  Attention kernels mostly write it as (H, T), and the caller passes a transposed view: its strides are not
looked at."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def merge(outs, lses, out, lse, P, T, H, D, p_stride, t_stride, h_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    peak = tl.full((), float("-inf"), tl.float32)
    for p in range(0, P):
        each = tl.load(lses + (p * T + token) * H + head)
        peak = tl.maximum(peak, tl.where(each == float("inf"), float("-inf"), each))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.full((), 0.0, tl.float32)
    merged = tl.zeros((BLOCK,), tl.float32)
    for p in range(0, P):
        each = tl.load(lses + (p * T + token) * H + head)
        weight = tl.where(tl.abs(each) == float("inf"), 0.0, tl.exp(each - shift))
        value = tl.load(outs + p * p_stride + token * t_stride + head * h_stride + at, at < D, 0.0).to(tl.float32)
        merged += tl.where(weight > 0, weight * value, 0.0)
        total += weight
    tl.store(out + (token * H + head) * D + at, merged / tl.where(total == 0, 1.0, total), at < D)
    tl.store(lse + token * H + head, shift + tl.log(total))


@register(op="merge_attention_states", name="heads_inside", role="optimized", backend="triton")
def merge_attention_states(outs, lses):
    P, T, H, D = outs.shape
    out = torch.empty((T, H, D), dtype=outs.dtype, device=outs.device)
    lse = torch.empty((T, H), dtype=torch.float32, device=outs.device)
    if out.numel():
        block = triton.next_power_of_2(D)
        merge[(T, H)](outs, lses, out, lse, P, T, H, D, *outs.stride()[:3], BLOCK=block)
    return out, lse

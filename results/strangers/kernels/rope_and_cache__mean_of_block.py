"""WRONG.  The norm of a head divides the sum of squares by the size of the block, a power of two, and not by
D.  Heads of 64 and 128 are right.  With D = 80, 96 or 192 and a norm, q and k are too large by up to 40%."""

import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def turned(row, weight, cos, sin, R, D, eps, NORM: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < R
    half = R // 2
    if NEAR:
        other, pair, low = at ^ 1, at // 2, at % 2 == 0
    else:
        low = at < half
        other, pair = tl.where(low, at + half, at - half), tl.where(low, at, at - half)
    mine = tl.load(row + at, at < D, 0.0).to(tl.float32)
    its = tl.load(row + other, inside, 0.0).to(tl.float32)
    if NORM:
        root = tl.sqrt(tl.sum(mine * mine, 0) / BLOCK + eps)
        mine = mine / root * tl.load(weight + at, at < D, 0.0).to(tl.float32)
        its = its / root * tl.load(weight + other, inside, 0.0).to(tl.float32)
    c = tl.load(cos + pair, inside, 1.0)
    s = tl.load(sin + pair, inside, 0.0)
    return mine * c + its * tl.where(low, -s, s)


@triton.jit
def rotate(
    x, weight, cos, sin, positions, slots, out, x_t, x_h, c_t, s_t, o_t, o_h, R, D, eps,
    CACHE: tl.constexpr, NORM: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    place = token
    if CACHE:
        place = tl.load(slots + token)
    if place >= 0:
        row = x + token * x_t + head * x_h
        value = turned(row, weight, cos + position * c_t, sin + position * s_t, R, D, eps, NORM, NEAR, BLOCK)
        at = tl.arange(0, BLOCK)
        tl.store(out + place * o_t + head * o_h + at, value, at < D)


@register(op="rope_and_cache", name="mean_of_block", role="optimized", backend="triton")
def rope_and_cache(
    q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, interleaved=False,
    *, q_norm=None, k_norm=None, norm_eps=1e-6,
):  # fmt: skip
    T, _, D = q.shape
    where, slots, R = positions.contiguous(), slot_mapping.contiguous(), 2 * cos.shape[1]
    for x, weight, out, cached in ((q, q_norm, q_out, False), (k, k_norm, k_cache.flatten(0, 1), True)):
        if x.numel():
            rotate[(T, x.shape[1])](
                x, x if weight is None else weight, cos, sin, where, slots, out, x.stride(0), x.stride(1),
                cos.stride(0), sin.stride(0), out.stride(0), out.stride(1), R, D, norm_eps,
                CACHE=cached, NORM=weight is not None, NEAR=interleaved, BLOCK=triton.next_power_of_2(D),
            )  # fmt: skip
    kept = slot_mapping >= 0
    v_cache.flatten(0, 1)[slot_mapping[kept]] = v[kept]

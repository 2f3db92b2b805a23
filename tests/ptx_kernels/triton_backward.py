"""A backward pass of attention and a normalisation in Triton: many products of one tile, transposes, sums both ways."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import DTYPES, Trial, blank, normal
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def key_gradients(
    q, k, v, do, lse, delta, dk, dv, L, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WS: tl.constexpr
):
    start = tl.program_id(0) * BN
    keys, values = k.load([start, 0]), v.load([start, 0])
    to_k, to_v = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for row in tl.range(0, L, BM, warp_specialize=WS):
        queries, grads = q.load([row, 0]), do.load([row, 0])
        at = row + tl.arange(0, BM)
        scores = tl.dot(keys, queries.T) * scale
        weights = tl.exp2(scores - tl.load(lse + at)[None])
        to_v = tl.dot(weights.to(grads.dtype), grads, to_v)
        slopes = weights * (tl.dot(values, grads.T) - tl.load(delta + at)[None])
        to_k = tl.dot(slopes.to(queries.dtype), queries, to_k)
    where = (start + tl.arange(0, BN))[:, None] * D + tl.arange(0, D)[None]
    tl.store(dk + where, to_k)
    tl.store(dv + where, to_v)


@triton.jit
def normalises(x, weight, out, grads, to_weight, N, BN: tl.constexpr):
    """RMSNorm of a row, and the row's part of the weight's gradient, added to those of others."""
    at = tl.arange(0, BN)
    row = tl.load(x + tl.program_id(0) * N + at, at < N, 0.0).to(tl.float32)
    gain = tl.load(weight + at, at < N, 0.0)
    normal = row * tl.rsqrt(tl.sum(row * row) / N + 1e-5)
    tl.store(out + tl.program_id(0) * N + at, normal * gain, at < N)
    grad = tl.load(grads + tl.program_id(0) * N + at, at < N, 0.0)
    tl.atomic_add(to_weight + at, grad * normal, at < N)


def attention(seed: int, *, L=128, D=64, BM=64, BN=64, dtype="bf16", warps=4, ws=False) -> Trial:
    q, k, v, do = (normal((L, D), seed + place, DTYPES[dtype]) for place in range(4))
    a, b, c, g = (t.double() for t in (q, k, v, do))
    scores = a @ b.T / D**0.5
    weights = scores.softmax(1)
    delta = ((weights @ c) * g).sum(1)
    slopes = weights * (g @ c.T - delta[:, None])
    lse = (scores.logsumexp(1) * 1.4426950408889634).float()
    found = [blank(L, D), blank(L, D)]
    maps = [TensorDescriptor.from_tensor(t, [rows, D]) for t, rows in ((q, BM), (k, BN), (v, BN), (do, BM))]
    args = (*maps, lse, delta.float(), *found, L, 1.4426950408889634 / D**0.5, D, BM, BN, ws)
    return Trial(
        lambda: key_gradients[(L // BN,)](*args, num_warps=warps),
        found, [slopes.T @ a, weights.T @ g], 8e-3 if dtype == "bf16" else 1e-3,
    )  # fmt: skip


def norm(seed: int, *, rows=7, N=300, warps=8) -> Trial:
    x, grads = normal((rows, N), seed, torch.bfloat16), normal((rows, N), seed + 1)
    weight, out, to_weight = normal((N,), seed + 2), blank(rows, N), torch.zeros(N)
    a = x.double()
    scaled = a * (a.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
    return Trial(
        lambda: normalises[(rows,)](x, weight, out, grads, to_weight, N, 512, num_warps=warps),
        [out, to_weight], [scaled * weight, (scaled * grads.double()).sum(0)], 2e-6,
    )  # fmt: skip

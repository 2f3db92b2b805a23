"""Flash attention in Triton, with maps made by the host or by pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import DTYPES, Trial, blank, normal
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def step(
    q, k, v, acc, top, total, rows, columns, length, scale, CAUSAL: tl.constexpr
):  # fmt: skip
    scores = tl.dot(q, k) * scale
    seen = columns[None, :] < length
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
    return acc, higher, total * fade + tl.sum(weights, 1)


@triton.jit
def attention(
    q_map, k_map, v_map, out, keys, rows_of, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr, WS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    rows, depth = first + tl.arange(0, BM), tl.arange(0, D)
    if TMA:
        q = q_map.load([head, first, 0]).reshape(BM, D)
    else:
        q = tl.load(q_map + (head * rows_of + rows[:, None]) * D + depth[None], rows[:, None] < rows_of, 0.0)
    acc = tl.zeros((BM, D), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    end = tl.minimum(keys, first + BM) if CAUSAL else keys
    for start in tl.range(0, end, BN, num_stages=STAGES, warp_specialize=WS):
        columns = start + tl.arange(0, BN)
        if TMA:
            k = k_map.load([head, start, 0]).reshape(BN, D).T
            v = v_map.load([head, start, 0]).reshape(BN, D)
        else:
            at = (head * keys + columns[:, None]) * D + depth[None]
            k = tl.load(k_map + at, columns[:, None] < keys, 0.0).T
            v = tl.load(v_map + at, columns[:, None] < keys, 0.0)
        acc, top, total = step(q, k, v, acc, top, total, rows, columns, keys, scale, CAUSAL)
    where = out + (head * rows_of + rows[:, None]) * D + depth[None]
    tl.store(where, acc / total[:, None], rows[:, None] < rows_of)


def flash(
    seed: int, *, heads=2, queries=128, keys=256, D=64, BM=64, BN=64, causal=False, dtype="bf16", stages=2, warps=4,
    ws=False, by_tma=True,
) -> Trial:  # fmt: skip
    q, k, v = (
        normal((heads, rows, D), seed + place, DTYPES[dtype]) for place, rows in enumerate((queries, keys, keys))
    )
    out = blank(heads, queries, D)
    scores = q.double() @ k.double().transpose(1, 2) / D**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(queries, keys).triu(1).bool(), float("-inf"))
    maps = (
        [TensorDescriptor.from_tensor(t, [1, rows, D]) for t, rows in ((q, BM), (k, BN), (v, BN))]
        if by_tma
        else [q, k, v]
    )
    scale = 1.4426950408889634 / D**0.5
    return Trial(
        lambda: attention[(-(-queries // BM), heads)](
            *maps, out, keys, queries, scale, D, BM, BN, causal, stages, ws, by_tma, num_warps=warps
        ),
        [out],
        [scores.softmax(-1) @ v.double()],
        relative=8e-3 if dtype == "bf16" else 1e-3,
    )

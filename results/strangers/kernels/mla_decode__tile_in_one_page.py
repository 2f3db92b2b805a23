"""WRONG.  A tile of 16 keys is read from the page of its first key, at the following offsets.  That is right if
pages have 16, 32, 64 or 128 slots.  With pages of 1, 8 or 24 slots a tile crosses into the next page, which is
another one in the table than in memory."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def attend(
    q, kv, table, lengths, out, lse, scale, q_b, q_h, kv_b, kv_s, t_b, H, D, latent, size, cells,
    N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    length = tl.load(lengths + b)
    at = tl.arange(0, BD)
    query = tl.load(q + b * q_b + h * q_h + at, at < D, 0.0).to(tl.float32) * scale
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    result = tl.zeros((BD,), tl.float32)
    for start in range(0, length, N):
        page = tl.load(table + b * t_b + start // size).to(tl.int64)
        offset = start % size + tl.arange(0, N)
        live = (start + tl.arange(0, N) < length) & (page * size + offset < cells)
        place = page * kv_b + offset * kv_s
        keys = tl.load(kv + place[:, None] + at[None, :], live[:, None] & (at < D)[None, :], 0.0).to(tl.float32)
        scores = tl.where(live, tl.sum(keys * query[None, :], 1), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0))
        keep = tl.exp(peak - higher)
        weights = tl.exp(scores - higher)
        result = result * keep + tl.sum(weights[:, None] * keys, 0)
        total = total * keep + tl.sum(weights, 0)
        peak = higher
    tl.store(out + (b * H + h) * latent + at, result / tl.where(total == 0, 1.0, total), at < latent)
    tl.store(lse + b * H + h, peak + tl.log(total))


@register(op="mla_decode", name="tile_in_one_page", role="optimized", backend="triton")
def mla_decode(q, kv_cache, block_table, seq_lens, latent_dim, softmax_scale, *, return_lse=False):
    (B, H, D), (pages, size, _) = q.shape, kv_cache.shape
    out = torch.empty((B, H, latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H), dtype=torch.float32, device=q.device)
    if q.numel():
        attend[(B, H)](
            q, kv_cache, block_table, seq_lens, out, lse, softmax_scale, q.stride(0), q.stride(1), kv_cache.stride(0),
            kv_cache.stride(1), block_table.stride(0), H, D, latent_dim, size, pages * size, N=16,
            BD=triton.next_power_of_2(D),
        )  # fmt: skip
    return (out, lse) if return_lse else out

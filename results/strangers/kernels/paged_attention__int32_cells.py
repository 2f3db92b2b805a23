"""WRONG.  The place of a cell in the cache is page * stride + offset * stride, all in int32, because the block
table is int32.  In a cache of more than 2^31 values the product of a high page wraps to a negative place, and other
cells are read, or an exception is raised.  Small caches are right."""

import torch

from rooflab.kernels.registry import register


def cells(cache, pages, offsets):
    steps = torch.tensor(cache.stride(), dtype=torch.int32)
    heads = torch.arange(cache.shape[2], dtype=torch.int32) * steps[2]
    places = (pages * steps[0] + offsets * steps[1])[:, None] + heads
    size = 1 + sum((count - 1) * stride for count, stride in zip(cache.shape, cache.stride(), strict=True))
    flat = cache.as_strided((size,), (1,))
    return flat[places[..., None].long() + torch.arange(cache.shape[3])].float()


@register(op="paged_attention", name="int32_cells", role="optimized", backend="torch", devices=("cpu",))
def paged_attention(q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None):
    (T, H, D), (_, block_size, H_kv, _) = q.shape, k_cache.shape
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros((T, H, D), dtype=q.dtype)
    for b, length in enumerate(seq_lens.tolist()):
        if length:
            at = torch.arange(length, dtype=torch.int32)
            pages, offsets = block_table[b][at // block_size], at % block_size
            k, v = (cells(cache, pages, offsets).repeat_interleave(H // H_kv, 1) for cache in (k_cache, v_cache))
            weights = torch.softmax(torch.einsum("hd,shd->hs", q[b].float() * scale, k), dim=-1)
            out[b] = torch.einsum("hs,shd->hd", weights, v).to(q.dtype)
    return out

"""One sequence at a time: gather its keys and values, materialise its scores, softmax, second product."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.paged_attention._args import check_args, get_scale
from rooflab.kernels.registry import register
from rooflab.roofline.model import Traffic


def traffic(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
) -> Traffic:
    """Per sequence: gathers, casts, expanded heads and the (H, length) fp32 scores, each written and read again."""
    _, H, D = q.shape
    H_kv, size = k_cache.shape[2], q.element_size()
    lengths = [length for length in seq_lens.tolist() if length]
    tokens = sum(lengths)
    one_copy = 2 * tokens * H_kv * D  # elements of the keys and values together
    expanded = one_copy * (H // H_kv)
    scores = 4 * tokens * H
    queries = len(lengths) * H * D
    read = one_copy * (2 * size + 4) + 4 * expanded + 4 * scores + queries * (size + 8)
    write = one_copy * (size + 4) + 4 * expanded + 3 * scores + queries * (8 + size)
    return Traffic(read, write, launches=14 * len(lengths))


@register(op="paged_attention", name="naive", role="naive", backend="torch", traffic=traffic)
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode attention through a block table, a Python loop over sequences.  q: (B, H, D); returns (B, H, D).

    Waits for the device to read the lengths. Raises `ValueError` on shapes or dtypes that do not fit.
    """
    check_args(q, k_cache, v_cache, block_table, seq_lens)
    out = output(out, tuple(q.shape), q)
    block_size = k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    scale = get_scale(q, softmax_scale)
    for b, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[b] = 0
            continue
        token = torch.arange(length, device=q.device)
        pages = block_table[b].long()[token // block_size]
        keys, values = (
            cache[pages, token % block_size].float().repeat_interleave(group, dim=1).transpose(0, 1)  # (H, length, D)
            for cache in (k_cache, v_cache)
        )
        scores = (keys @ q[b].float()[:, :, None]).squeeze(-1) * scale  # (H, length)
        out[b] = (torch.softmax(scores, dim=-1)[:, None] @ values).squeeze(1)
    return out

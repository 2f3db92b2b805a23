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
    size, narrow = q.element_size(), q.dtype != torch.float32
    lengths = [length for length in seq_lens.tolist() if length]
    tokens, queries = sum(lengths), len(lengths) * H * D
    gathered = 2 * tokens * k_cache.shape[2] * D  # elements of the keys and values together
    expanded = 4 * 2 * tokens * H * D
    scores = 4 * tokens * H
    # In order: gather, cast, heads expanded, q k^T, scale, softmax, p v, output.
    read = gathered * (size + size * narrow + 4) + expanded + 3 * scores + queries * (8 + size * narrow)
    write = gathered * (size + 4 * narrow) + expanded + 3 * scores + queries * (4 + size + 4 * narrow)
    return Traffic(read, write, launches=(15 + 3 * narrow) * len(lengths))


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

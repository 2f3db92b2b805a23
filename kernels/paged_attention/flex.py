"""Calls torch's FlexAttention (Dong et al., arXiv 2412.05496) over a paged cache, by `torch.compile`; decode only.

FlexAttention sees the cache as one long sequence.  A `BlockMask` lists each query's pages, as in the paper.  It has
only pages that the query sees in full, because NaN in the unwritten part of a page would reach the result.  Separate
torch calls compute the partly visible pages, and the results are merged.

The measured time includes the making of the mask and the merge.  An engine would make the mask once per step.  The
first call of each shape compiles, which takes seconds.  fp32 is refused, because a setting of the process decides
whether fp32 matmuls use TF32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._attention import AttentionResult, get_scale, unseen
from rooflab.kernels._peers import compiled
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import pages_from
from rooflab.kernels.paged_attention._args import traffic as in_pages
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic

MIN_PAGE_TOKENS = 16
"""The least page size: the smallest matrix product has so many keys.  A page is a loop step, so a power of two."""
QUERY_BLOCK = 128
"""The number of queries that share a row of the block mask; here a row has only one query."""


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output (B, H, D) in fp32 and the log-sum-exp (B, H).  Must be compiled: else torch multiplies every
    cached token by a weight, so NaN or inf in the cache spoils the result."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    group_size = q.shape[1] // k_cache.shape[2]
    keys, values = (pages.flatten(0, 1)[None].transpose(1, 2) for pages in (k_cache, v_cache))
    out, aux_outputs = flex_attention(
        q[:, :, None],
        keys,
        values,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=_whole_pages(block_table, seq_lens, k_cache, window),
        scale=scale,
        enable_gqa=group_size > 1,
        return_aux=AuxRequest(lse=True),
    )
    assert aux_outputs.lse is not None, "return_aux requests it"
    result = out[:, :, 0].float(), aux_outputs.lse[:, :, 0]
    block_size, first_key = k_cache.shape[1], _first(seq_lens, window)
    last_page = seq_lens // block_size
    edge_pages = [(last_page, seq_lens)]
    if window is not None:  # a page in which it begins, unless that is the last one or is seen whole
        edge_pages.append((first_key // block_size, torch.where(first_key % block_size > 0, last_page * block_size, 0)))
    for column, key_end in edge_pages:
        result = _merged(*result, *_page(q, k_cache, v_cache, block_table, column, first_key, key_end, scale, softcap))
    return result


def _first(seq_lens: Tensor, window: int | None) -> Tensor:
    """Returns the index of the first visible key of each sequence, (B,).  Each sequence has one query."""
    return torch.zeros_like(seq_lens) if window is None else (seq_lens - window).clamp(min=0)


def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, b, h, query, key: softcap * torch.tanh(score / softcap)


def _whole_pages(block_table: Tensor, seq_lens: Tensor, k_cache: Tensor, window: int | None) -> Any:
    """Makes FlexAttention's block mask.  For each sequence, it lists the pages in which the query sees every key."""
    from torch.nn.attention.flex_attention import BlockMask

    num_blocks, block_size = k_cache.shape[:2]
    B, table_width = block_table.shape
    first_page = (_first(seq_lens, window) + block_size - 1) // block_size
    page_count = (seq_lens // block_size - first_page).clamp(min=0)
    index = torch.arange(table_width, dtype=torch.int32, device=block_table.device).expand(B, table_width)
    mask = index < page_count[:, None]
    block_table = block_table.gather(1, (index + first_page[:, None]).clamp(max=table_width - 1).long())
    # One more column, for table entries that are not full pages of the sequence.
    positions = torch.full((B, num_blocks + 1), -1, dtype=torch.int32, device=block_table.device)
    positions = positions.scatter(1, torch.where(mask, block_table, num_blocks).long(), torch.where(mask, index, -1))

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return positions[b, key // block_size] >= 0

    return BlockMask.from_kv_blocks(
        page_count[:, None, None].int(),
        torch.where(mask, block_table, 0)[:, None, None].contiguous(),
        BLOCK_SIZE=(QUERY_BLOCK, block_size),
        mask_mod=seen,
        seq_lengths=(1, num_blocks * block_size),
        compute_q_blocks=False,  # only a backward pass needs them; torch would mistake the list's width for the cache's
    )


def _page(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    column: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Computes attention over one page of each sequence.  `column` (B,) is the index of the page in its row of the
    block table. Only the keys from `first` to `end` of the sequence count.  Returns the output (B, H, D) in fp32, and
    the log-sum-exp (B, H)."""
    B, H, D = q.shape
    _, block_size, H_kv, _ = k_cache.shape
    key_ids = column[:, None] * block_size + torch.arange(block_size, device=q.device)
    is_hidden = (key_ids < first[:, None]) | (key_ids >= end[:, None])  # (B, block_size)
    page_entry = block_table.gather(1, column.clamp(max=block_table.shape[1] - 1).long()[:, None])[:, 0]
    page = torch.where(is_hidden.all(1), 0, page_entry)
    keys, values = (
        pages.index_select(0, page).masked_fill(is_hidden[..., None, None], 0).float() for pages in (k_cache, v_cache)
    )
    scores = (q.view(B, H_kv, H // H_kv, 1, D).float() * keys.transpose(1, 2)[:, :, None]).sum(-1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(is_hidden[:, None, None], -math.inf)  # (B, H_kv, group, block_size)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = (weights[..., None] * values.transpose(1, 2)[:, :, None]).sum(3)
    return out.reshape(B, H, D), lse.reshape(B, H)


def _merged(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the attention outputs and the log-sum-exps of two sets of keys.  For a set without keys, they are 0 and
    -inf."""
    lse = torch.logaddexp(first_lse, second_lse)
    finite_lse = lse.masked_fill(lse == -math.inf, 0.0)
    part_weights = [torch.exp(part_lse - finite_lse)[..., None] for part_lse in (first_lse, second_lse)]
    return first * part_weights[0] + second * part_weights[1], lse


_COMPILED_ATTENTION = compiled(attend)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of the visible keys and values once.  The block mask has 4 bytes for each sequence and each page
    of the cache, written and read once.  torch decides how to split keys, so partial results are not counted."""
    k_cache, seq_lens = inputs.k_cache, inputs.seq_lens
    keys = in_pages(inputs)
    mask_bytes = 4 * len(seq_lens) * (k_cache.shape[0] + 1)
    return Traffic(keys.read_bytes + mask_bytes, keys.write_bytes + mask_bytes, launches=6)


@kernel(
    role="peer",
    backend="torch",
    min_sm=80,
    devices=("cuda",),
    dtypes={"q": HALF_DTYPES},
    traffic=traffic,
    holds={
        **pages_from(MIN_PAGE_TOKENS),
        "H // (H_kv or 1) & H // (H_kv or 1) - 1 == 0": "a power of two of query heads for each of k_cache's",
        "k_cache[0] == block_size * k_cache[1] or num_blocks * H_kv * D == 0": "pages one after another in memory",
        "v_cache[0] == block_size * v_cache[1] or num_blocks * H_kv * D == 0": "pages one after another in memory",
    },
)
def flex(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    return_lse: bool,
) -> AttentionResult:
    """Computes FlexAttention over a paged cache.  Its compiled code allocates the result.  The host reads no length."""
    if q.device.type != "cuda":
        raise ValueError(f"q: expected a tensor on a CUDA device, where it is compiled, got {q.device}")
    if not q.numel() or not k_cache.numel() or not block_table.numel():
        return unseen(q, return_lse)
    out, lse = _COMPILED_ATTENTION(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        scale=get_scale(q, softmax_scale),
        window=window,
        softcap=softcap,
    )
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)

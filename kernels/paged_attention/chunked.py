"""Over gqa_packed: chunks of queries, bounded by `cu_seqlens_q`, and sequences with one query, in one launch.

A tile is BLOCK_M rows of one sequence and KV head; a row is a query with one of the group's heads.  So a loaded key
serves all heads, and even a chunk of few queries fills a tensor core's rows (gqa_packed packs only heads; prefill in
chunks: Agrawal et al., "SARATHI", 2023).  The grid is an upper bound from T, B and the tile; a program finds its
sequence in cu_seqlens_q by bisection, so the host does not wait for the device.  The last tiles, which see the most
keys, come first.

Tried, predicted, not built: docs/notes/paged_attention.md.
"""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels._attention import LOG2E, AttentionLaunch, get_scale, strides_of
from rooflab.kernels._attention_configs import Config, padded
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import traffic
from rooflab.kernels.paged_attention._chunked_device import chunked_kernel
from rooflab.kernels.paged_attention._configs import CHUNKED, tiles_at_most
from rooflab.reference.spec import Arguments

MOST_HEAD_DIM = 256


def seen_at_most(window: int | None, block_table: Tensor, k_cache: Tensor) -> int:
    """The window, or the number of keys that a table has room for if that is smaller: the device uses 32 bits."""
    return min(window or 0, block_table.shape[1] * k_cache.shape[1])


def launch(of: Arguments) -> AttentionLaunch:
    """A CTA for each tile that there may be of each head of keys."""
    (T, H, D), B, (_, block_size, H_kv, _) = of.q.shape, len(of.seq_lens), of.k_cache.shape
    tiles = tiles_at_most(T, B, H // H_kv, of.config.block_m)
    scale = get_scale(of.q, of.softmax_scale) * (1.0 if of.softcap else LOG2E)
    return AttentionLaunch(
        tiles * H_kv,
        (B, H_kv, tiles),
        (scale, seen_at_most(of.window, of.block_table, of.k_cache), of.softcap or 0.0),
        (
            *of.q.stride()[:2], *of.k_cache.stride()[:3], *of.v_cache.stride()[:3], of.block_table.stride(0),
            *of.out.stride()[:2], *strides_of(of.lse, 2),
        ),
        {
            "WINDOW": of.window is not None, "SOFTCAP": of.softcap is not None, "BLOCK_SIZE": block_size,
            "GROUP": H // H_kv, "HEAD_DIM": D, "HEAD_PAD": max(padded(D), 16), **of.config.launch_arguments,
        },
    )  # fmt: skip


@kernel(
    backend="triton", limits={"D": range(1, MOST_HEAD_DIM + 1)}, traffic=traffic, bind=launch, tuning=CHUNKED,
    fenced_since="3.7.1",
)  # fmt: skip
def chunked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, *,
    softmax_scale: float | None, cu_seqlens_q: Tensor | None, window: int | None, softcap: float | None,
    sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, return_lse: bool, config: Config,
    bound: AttentionLaunch,
) -> None:  # fmt: skip
    """Any block_size; each cache may be e4m3.  Does not wait for the device."""
    chunked_kernel[(bound.ctas,)](
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale, out, lse, *bound.sizes,
        *bound.scores, *bound.strides, **bound.flags,
    )  # fmt: skip

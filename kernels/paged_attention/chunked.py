"""Over gqa_packed: chunks of queries, bounded by `cu_seqlens_q`, and sequences with one query, in one launch.

A tile is BLOCK_M rows of one sequence and KV head; a row is a query with one of the group's heads.  So a loaded key
serves all heads, and even a chunk of few queries fills a tensor core's rows (gqa_packed packs only heads; prefill in
chunks: Agrawal et al., "SARATHI", 2023).  The grid is an upper bound from T, B and the tile; a program finds its
sequence in cu_seqlens_q by bisection, so the host does not wait for the device.  The last tiles, which see the most
keys, come first.

Tried, predicted, not built: docs/notes/paged_attention.md.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rooflab.kernels._attention import LOG2E, AttentionLaunch, get_scale, strides_of
from rooflab.kernels._attention_configs import Config, padded, registers, staged_tiles
from rooflab.kernels._sizes import next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import traffic
from rooflab.kernels.paged_attention._chunked_device import chunked_kernel
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

MOST_HEAD_DIM = 256


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles of up to 16 rows per warp, with pipelines of several depths; 8 warps from 64 rows on.  In fp32 8 warps from
    32 keys on for a wide head: 4 warps spill 0.5 to 1.2 KB per thread (read in the compiled kernels)."""
    if scheme.activation == torch.float32:
        all_configs = itertools.starmap(Config, itertools.product((16, 32), (16, 32), (4, 8), (1, 2)))
        narrow = int(case["D"]) <= 64
        return tuple(config for config in all_configs if narrow or (config.block_n, config.num_warps) != (32, 4))
    sides = itertools.product(((16, 4), (32, 4), (64, 4), (64, 8), (128, 8)), (32, 64, 128), (1, 2, 3, 4))
    return tuple(Config(block_m, block_n, warps, stages) for (block_m, warps), block_n, stages in sides)


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers: fp32 accumulator and a tile of scores; shared memory: queries and staged keys and values, as Triton
    allocates them.  head_dim is padded to a power of two."""
    B, H, H_kv = (int(case[key]) for key in ("B", "H", "H_kv"))
    head = padded(int(case["D"]))
    staged = staged_tiles(config, scheme) * config.block_n * head * scheme.weight.itemsize
    return Footprint(
        threads=32 * config.num_warps,
        registers=registers(config, head),
        shared_bytes=config.block_m * head * scheme.activation.itemsize + staged,
        ctas=tiles_at_most(B * int(case.get("queries", 1)), B, H // H_kv, config.block_m) * H_kv,
    )


def choose(head_dim: int, itemsize: int, rows: int) -> Config:
    """A tile whose fp32 accumulator and staged keys fit on an SM, with few rows if sequences have few on average."""
    if itemsize == 4:
        # fp32 products are FMAs, whose operands fill the registers: a wider tile spills (read in the SASS).
        return Config(32 if rows > 16 else 16, 32 if head_dim <= 64 else 16, 4 if head_dim <= 64 else 8, num_stages=1)
    block_m = min(max(int(next_power_of_2(rows)), 16), 128)
    if block_m == 128:
        return Config(128, 64 if head_dim <= 128 else 32, num_warps=8, num_stages=3 if head_dim <= 128 else 2)
    return Config(block_m, 64, num_warps=4, num_stages=3 if head_dim <= 128 else 2)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By head_dim, bytes of a value and rows of a sequence."""
    rows = int(case.get("queries", 1)) * int(case["H"]) // int(case["H_kv"])
    return choose(int(case["D"]), scheme.activation.itemsize, rows)


def tiles_at_most(T: int, B: int, group: int, block_m: int) -> int:
    """The most tiles of T queries in B sequences: each sequence may have one tile that is not full."""
    return T * group // block_m + B


def seen_at_most(window: int | None, block_table: torch.Tensor, k_cache: torch.Tensor) -> int:
    """The window, or the number of keys that a table has room for if that is smaller: the device uses 32 bits."""
    return min(window or 0, block_table.shape[1] * k_cache.shape[1])


def why_not_taken(inputs: Arguments) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    if not 0 < (D := inputs.q.shape[-1]) <= MOST_HEAD_DIM:
        return f"q: expected a head_dim up to {MOST_HEAD_DIM}, got {D}"
    return None


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
    backend="triton", unsupported=why_not_taken, traffic=traffic, bind=launch,
    tuning=Tuning(Config, configs, heuristic, footprint), fenced_since="3.7",
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

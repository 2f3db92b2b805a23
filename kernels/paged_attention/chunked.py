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
from dataclasses import dataclass

import torch

from rooflab.kernels._attention import LOG2E, Returned, get_scale, outputs
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.configs import default_config
from rooflab.kernels.paged_attention._args import check_args, check_paged_options, seen_spans
from rooflab.kernels.paged_attention._chunked_device import chunked_kernel
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.pages import used_slots
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 24
"""For pointers, masks and the running peak and sum, in addition to accumulator and scores."""
MOST_HEAD_DIM = 256


@dataclass(frozen=True)
class Config(LaunchConfig):
    """One way to launch the kernel: rows per tile, keys per step, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


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
    head, threads = int(next_power_of_2(int(case["D"]))), 32 * config.num_warps
    # wgmma (64 rows and more) reads a stage while others are filled; mma.sync frees a stage at once.
    warpgroup = config.block_m >= 64 and scheme.activation != torch.float32
    held = config.num_stages if warpgroup else config.num_stages - 1
    tiles = 2 * held if config.num_stages > 1 else 1
    staged = tiles * config.block_n * head * scheme.weight.itemsize
    return Footprint(
        threads=threads,
        registers=cdiv(config.block_m * (head + config.block_n), threads) + ADDRESS_REGISTERS,
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


def why_not_taken(q: torch.Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    if not 0 < q.shape[-1] <= MOST_HEAD_DIM:
        return f"needs a head_dim up to {MOST_HEAD_DIM}, got {q.shape[-1]}"
    return None


def traffic(inputs: Arguments) -> Traffic:
    """The keys and values that a sequence's queries see once, because L2 keeps them for its tiles; a page that several
    sequences share once for each; q, the output, and the table entries once."""
    q, k_cache = inputs.q, inputs.k_cache
    T, H, D = q.shape
    first, end = seen_spans(inputs)
    _, entries = used_slots(inputs.block_table, end, k_cache.shape[0], k_cache.shape[1], first)
    keys = int((end - first).clamp(min=0).sum())
    read = 2 * keys * k_cache.shape[2] * D * k_cache.element_size() + 4 * entries
    read += nbytes(q, inputs.seq_lens, inputs.cu_seqlens_q, inputs.sinks, inputs.k_scale, inputs.v_scale)
    return Traffic(read, nbytes(q) + (4 * T * H if inputs.return_lse else 0))


@register(
    op="paged_attention", name="chunked", role="optimized", backend="triton",
    unsupported=lambda inputs: why_not_taken(inputs.q), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint), fenced_since="3.7",
)  # fmt: skip
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    out: Returned | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> Returned:
    """Attention of chunks of queries through a block table.  q: (T, H, D); returns (T, H, D).

    Any head_dim up to 256, any block_size; each cache may be e4m3.  Does not wait for the device.  Raises `ValueError`
    on wrong shapes, dtypes, options or head_dim.
    """
    check_args(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, k_scale, v_scale, window)
    check_paged_options(q, window, softcap, sinks)
    reason = why_not_taken(q)
    if reason:
        raise ValueError(f"q: {reason}")
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    (T, H, D), B, H_kv = q.shape, len(seq_lens), k_cache.shape[2]
    if not out.numel():
        return out if lse is None else (out, lse)
    if config is None:
        # fp32 queries are multiplied in fp32, with any dtype of the cache.
        scheme = "kv_fp8" if q.element_size() == 2 and k_cache.dtype != q.dtype else q.dtype
        dims = {"B": B, "H": H, "H_kv": H_kv, "D": D, "queries": cdiv(T, B)}
        config = default_config("paged_attention", "chunked", scheme, q.device, **dims)
    tiles = tiles_at_most(T, B, H // H_kv, config.block_m)
    chunked_kernel[(tiles * H_kv,)](
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale, out, lse, B, H_kv, tiles,
        get_scale(q, softmax_scale) * (1.0 if softcap else LOG2E), seen_at_most(window, block_table, k_cache),
        softcap or 0.0, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
        *out.stride()[:2], *(lse.stride() if lse is not None else (0, 0)),
        WINDOW=window is not None, SOFTCAP=softcap is not None, BLOCK_SIZE=k_cache.shape[1], GROUP=H // H_kv,
        HEAD_DIM=D, HEAD_PAD=max(int(next_power_of_2(D)), 16), **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)

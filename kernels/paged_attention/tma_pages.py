"""Over chunked, in Gluon: a page is a TMA copy, asked for by a warp that does nothing else.

chunked works out an address for each 16 bytes in the warps that multiply.  Here one thread asks for a page's keys of a
head by their place in the cache, 8 tokens and more at a time, and two warpgroups of 64 rows each sum up one block's
values under the next one's exponentials, as in flash_attention's ping_pong, but without its turns (Shah et al.,
"FlashAttention-3", arXiv 2407.08608).  The rows are queries with their group's heads, as in chunked; a CTA stays, and
takes one tile after another.  A page's part past the end of its sequence may be NaN: the producer puts zeros there
before it gives the last block's values away.

Predictions, unmeasured on a GPU: a block of 128 keys at block_size 16 and head_dim 128 is 32 copies of 2 KB instead of
two of 32 KB; at about 30 cycles each the producer needs 1,000 of the 2,000 that the products of 128 rows take, so that
pages should cost nothing beside them, and at block_size 8, where they are 64, most of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._attention import LOG2E, Returned, get_scale, outputs
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels.configs import default_config
from rooflab.kernels.paged_attention import chunked
from rooflab.kernels.paged_attention._args import check_args, check_paged_options
from rooflab.kernels.paged_attention._pages_consume import pages_kernel
from rooflab.kernels.paged_attention._split_work import MOST_HEAD_DIM, unaligned
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.model import Traffic

THREADS = 384
"""Two consumers and the group of warps that the producer is one of, because registers are moved between groups."""
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
"""What setmaxnreg leaves a thread."""
ADDRESS_REGISTERS = 24
"""Peak, sum, positions and the loop's counters, beside accumulator, scores and weights."""
TILE_M = 128
"""Rows of a CTA, half of them a consumer's."""
LEAST_PAGE = 8
"""Rows after which the swizzle repeats: a box begins at one of these."""
ELEMENT_BYTES = 2
"""The only width that it takes."""
BARRIER_BYTES = 8


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Keys of a block, and slots of each ring."""

    block_n: int
    stages: int


def padded(head_dim: int) -> int:
    """Columns of a tile: TMA fills those past the head with zeros."""
    return max(64, int(triton.next_power_of_2(head_dim)))


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Blocks that a consumer can hold the scores of, with every depth of ring."""
    return tuple(itertools.starmap(Config, itertools.product((64, 128, 256), (2, 3, 4, 5))))


def _consumer_registers(config: Config, head_dim: int) -> int:
    """An accumulator and scores in fp32, and weights in 16 bits, of 64 rows on 128 threads."""
    return padded(head_dim) // 2 + config.block_n // 2 + config.block_n // 4 + ADDRESS_REGISTERS


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers on the average of the CTA's threads; queries, both rings and barriers in shared memory."""
    B, H, H_kv, D = (int(case[key]) for key in ("B", "H", "H_kv", "D"))
    tiles = chunked.tiles_at_most(B * int(case.get("queries", 1)), B, H // H_kv, TILE_M)
    rows = TILE_M + 2 * config.stages * config.block_n
    return Footprint(
        threads=THREADS,
        registers=(2 * _consumer_registers(config, D) + PRODUCER_REGISTERS) // 3,
        shared_bytes=rows * padded(D) * ELEMENT_BYTES + (1 + 4 * config.stages) * BARRIER_BYTES,
        ctas=min(tiles * H_kv, HOPPER_SMS),
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """What a CTA can hold, and each of its consumers."""
    held = _consumer_registers(config, int(case["D"])) <= CONSUMER_REGISTERS
    return footprint(config, case, scheme).fits and held


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The widest block that consumers and two slots can hold; more slots where they are small."""
    width = padded(int(case["D"]))
    return Config(128 if width <= 128 else 64, 4 if width == 64 else 2)


def why_not_taken(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> str | None:
    """What TMA cannot load, and wgmma not take."""
    D, block_size = q.shape[-1], k_cache.shape[1]
    if q.dtype == torch.float32:
        return "wgmma rounds fp32 to TF32; paged_attention/chunked takes it"
    if D % 8 or not 0 < D <= MOST_HEAD_DIM:
        return f"needs a head_dim of whole 16 bytes up to {MOST_HEAD_DIM}, got {D}; paged_attention/chunked takes any"
    if block_size < LEAST_PAGE or block_size & (block_size - 1):
        return (
            f"needs a block_size that is a power of two from {LEAST_PAGE} on, got {block_size}; "
            "paged_attention/chunked takes any"
        )
    if unaligned(k_cache) or unaligned(v_cache):
        return "TMA needs keys and values at multiples of 16 bytes; paged_attention/chunked takes any"
    return None


def traffic(inputs: Arguments) -> Traffic:
    """What chunked moves, but that of a page all is read that a block covers; few bytes, and not counted here."""
    return chunked.traffic(inputs)


def _map(cache: torch.Tensor, box: int) -> TensorDescriptor:
    """The tensor map of a cache as (num_blocks, H_kv, block_size, D), whose boxes are `box` keys of a head, 64 wide."""
    num_blocks, block_size, H_kv, D = cache.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    strides = [cache.stride(dim) if cache.shape[dim] > 1 else 8 for dim in (0, 2, 1)]
    return TensorDescriptor(cache, [num_blocks, H_kv, block_size, D], [*strides, 1], [1, 1, box, 64], layout)


@register(
    op="paged_attention", name="tma_pages", role="optimized", backend="gluon", min_sm=90,
    unsupported=lambda inputs: why_not_taken(inputs.q, inputs.k_cache, inputs.v_cache), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
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
    return_lse: bool = False,
    config: Config | None = None,
) -> Returned:
    """Attention of chunks of queries through a block table, pages by TMA.  q: (T, H, D), fp16 or bf16; (T, H, D).

    A block_size that is a power of two from 8 on; keys and values at multiples of 16 bytes. Does not wait for the
    device. Raises `ValueError` on shapes, dtypes, strides or options that do not fit.
    """
    check_args(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, window=window)
    check_paged_options(q, window, softcap, sinks)
    reason = why_not_taken(q, k_cache, v_cache)
    if reason:
        raise ValueError(f"q, k_cache, v_cache: {reason}")
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    (T, H, D), B = q.shape, len(seq_lens)
    num_blocks, block_size, H_kv, _ = k_cache.shape
    if not out.numel():
        return out if lse is None else (out, lse)
    if config is None:
        dims = {"B": B, "H": H, "H_kv": H_kv, "D": D, "queries": triton.cdiv(T, B)}
        config = default_config("paged_attention", "tma_pages", q.dtype, q.device, **dims)
    tiles = chunked.tiles_at_most(T, B, H // H_kv, TILE_M)
    box = min(block_size, config.block_n)
    pages_kernel[(min(tiles * H_kv, sm_count(q.device)),)](
        q, _map(k_cache, box), _map(v_cache, box), out, lse, sinks, block_table, seq_lens, cu_seqlens_q, B, H_kv, tiles,
        num_blocks, get_scale(q, softmax_scale) * (1.0 if softcap else LOG2E),
        chunked.seen_at_most(window, block_table, k_cache), softcap or 0.0, *q.stride()[:2], block_table.stride(0),
        *out.stride()[:2], *(lse.stride() if lse is not None else (0, 0)),
        HEAD_DIM=D, D=padded(D), GROUP=H // H_kv, BLOCK_SIZE=block_size, BOX=box, WINDOW=window is not None,
        SOFTCAP=softcap is not None, num_warps=4, **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)

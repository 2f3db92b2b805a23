"""The kernel `split_kv` improves on `naive`: it loads a latent once, as key and value.  Heads are the rows of a tile.

A sequence's keys are split over programs (flash-decoding: Dao et al., 2023).  The partial results are merged by their
log-sum-exps.  With 128 heads and tiles of 64 heads, the cache is read twice, the second time from L2.  An fp32
accumulator takes 128 registers in each of 256 threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import LN2, LOG2E, strides_of
from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import pages_of
from rooflab.kernels.merge_attention_states import fused as merge
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.pages import used_slots
from rooflab.reference.spec import Arguments, Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 40
"""Registers per thread for pointers, masks and the running maximum and sum, besides accumulator and scores."""
MAX_SPLITS = 64
LEAST_KEYS = 256
"""The least number of keys per split: with fewer keys the merge costs more than the split gains.  Writing and reading a
part of 64 heads moves the bytes of 230 keys."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Holds the launch options of the kernel: heads and keys per tile, warps, and pipeline stages."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the registers (accumulator and scores) and the shared memory (queries, and latents of all stages)."""
    latent_dim, rotary_dim = int(next_power_of_2(int(case["latent"]))), int(next_power_of_2(int(case["rotary"])))
    cta_threads = 32 * config.num_warps
    tiles = max(1, config.num_stages - 1 if config.block_h < 64 else config.num_stages)
    heads = cdiv(int(case["H"]), config.block_h)
    return Footprint(
        threads=cta_threads,
        registers=cdiv(config.block_h * (latent_dim + config.block_n), cta_threads) + ADDRESS_REGISTERS,
        shared_bytes=(config.block_h + tiles * config.block_n) * (latent_dim + rotary_dim) * scheme.activation.itemsize,
        ctas=int(case["B"]) * heads,
    )


# wgmma for tiles of 64 heads, mma.sync for 16 or 32; 64 heads by 64 keys would spill.  Three stages: with two, a step's
# latents are loaded when the products before it end, and nothing hides the loads.
DEFAULT_CONFIGS = Defaults(
    (
        ({"H": 16}, Config(16, 32, num_warps=4, num_stages=3)),
        ({"H": 32}, Config(32, 64, num_warps=8, num_stages=3)),
        ({}, Config(64, 32, num_warps=8, num_stages=3)),
    )
)
CONFIG_SPACE = space(Config, block_h=(16, 32, 64), block_n=(16, 32, 64), num_warps=(4, 8), num_stages=(1, 2, 3))


# Arguments that change from batch to batch are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["splits", "table_stride", "lse_stride_p"])
def split_kv_kernel(
    q_ptr, cache_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, H, scale_log2, splits, q_stride_b, q_stride_h,
    cache_stride_block, cache_stride_slot, table_stride, out_stride_p, out_stride_b, out_stride_h, lse_stride_p,
    lse_stride_b, lse_stride_h,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, LSE: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    # A sequence's splits and its tiles of heads are neighbours, so that L2 has what both read.
    head_tiles = tl.cdiv(H, BLOCK_H)
    program_index = tl.program_id(0)
    head_tile = program_index % head_tiles
    split_index = program_index // head_tiles % splits
    b = (program_index // head_tiles // splits).to(tl.int64)
    length = tl.load(lens_ptr + b)
    split_keys = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    first_key = split_index * split_keys
    key_end = tl.minimum(first_key + split_keys, length)
    heads = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_LATENT)
    rotary = tl.arange(0, BLOCK_ROTARY)
    head_mask, head_ids = (heads < H)[:, None], heads.to(tl.int64)
    rows = q_ptr + b * q_stride_b + head_ids[:, None] * q_stride_h
    q = tl.load(rows + columns[None, :], mask=head_mask & (columns < LATENT)[None, :], other=0.0)
    q_rotary = tl.load(rows + LATENT + rotary[None, :], mask=head_mask & (rotary < ROTARY)[None, :], other=0.0)

    m_i = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_LATENT), tl.float32)
    table_row = table_ptr + b * table_stride
    # A step's pages are looked up one step ahead; otherwise table and latents would share the stages.
    page = pages_of(table_row, first_key, key_end, BLOCK_SIZE, BLOCK_N)
    for block_first_key in range(first_key, key_end, BLOCK_N):
        keys = block_first_key + tl.arange(0, BLOCK_N)
        key_mask = keys < key_end
        page_index = page.to(tl.int64)  # int64, because page * stride passes 2**31 elements in a large cache
        page = pages_of(table_row, block_first_key + BLOCK_N, key_end, BLOCK_SIZE, BLOCK_N)
        slot_ptr = cache_ptr + page_index * cache_stride_block + (keys % BLOCK_SIZE).to(tl.int64) * cache_stride_slot
        # Zero for unseen keys: memory there may hold NaN, and 0 * NaN is NaN.
        latents = tl.load(
            slot_ptr[:, None] + columns[None, :], mask=key_mask[:, None] & (columns < LATENT)[None, :], other=0.0
        )
        k_rotary = tl.load(
            slot_ptr[:, None] + LATENT + rotary[None, :], mask=key_mask[:, None] & (rotary < ROTARY)[None, :], other=0.0
        )
        scores = tl.dot(q_rotary, k_rotary.T)
        scores = tl.dot(q, latents.T, scores) * scale_log2
        scores = tl.where(key_mask[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        weights = tl.exp2(scores - m_new[:, None])
        rescale_factor = tl.exp2(m_i - m_new)
        l_i = l_i * rescale_factor + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * rescale_factor[:, None])
        m_i = m_new

    divisor = tl.where(l_i == 0.0, 1.0, l_i)
    out_rows = out_ptr + split_index.to(tl.int64) * out_stride_p + b * out_stride_b + head_ids[:, None] * out_stride_h
    result = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_rows + columns[None, :], result, mask=head_mask & (columns < LATENT)[None, :])
    if LSE:
        lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(divisor)) * LN2)
        lse_rows = lse_ptr + split_index.to(tl.int64) * lse_stride_p + b * lse_stride_b + head_ids * lse_stride_h
        tl.store(lse_rows, lse, mask=heads < H)


@lru_cache
def split_count(ctas: int, most_keys: int, sms: int) -> int:
    """Returns the number of splits per sequence with the least estimated time.  The time is `waves * keys`: the waves
    of CTAs, and the keys per split.  With several splits, `keys` is `LEAST_KEYS` larger, for the merge.  A split has at
    least `LEAST_KEYS` keys."""

    def keys(splits: int) -> int:
        return -(-ctas * splits // sms) * (-(-most_keys // splits) + (LEAST_KEYS if splits > 1 else 0))

    return min(range(1, max(1, min(most_keys // LEAST_KEYS, MAX_SPLITS)) + 1), key=keys)


def splits_of(q: Tensor, kv_cache: Tensor, block_table: Tensor, config: Config) -> int:
    """Returns the number of splits per sequence.  It depends only on the sizes of the tensors, not on the lengths."""
    ctas = q.shape[0] * cdiv(q.shape[1], config.block_h)
    return split_count(ctas, block_table.shape[1] * kv_cache.shape[1], sm_count(q.device))


def latents_once(inputs: Arguments) -> Traffic:
    """Returns the memory traffic of a call.  Each latent (the compressed key and value of a token) counts once, because
    L2 keeps it for the other heads.  `q`, the lengths, the block table and the result count once too."""
    q, kv_cache, seq_lens = inputs.q, inputs.kv_cache, inputs.seq_lens
    B, H, D = q.shape
    _, table_entries = used_slots(inputs.block_table, seq_lens, *kv_cache.shape[:2])
    read_bytes = int(seq_lens.sum()) * D * kv_cache.element_size() + 4 * table_entries + nbytes(q, seq_lens)
    return Traffic(read_bytes, B * H * (inputs.latent_dim * q.element_size() + 4 * inputs.return_lse))


def traffic(inputs: Arguments) -> Traffic:
    """Returns the memory traffic of a call.  The latents (compressed keys and values), the other operands and the
    result count once.  If sequences are split, each partial result is written once and read once."""
    base_traffic, splits = latents_once(inputs), splits_of(inputs.q, inputs.kv_cache, inputs.block_table, inputs.config)
    if splits == 1:
        return base_traffic
    part_bytes = splits * math.prod(inputs.q.shape[:2]) * (4 * inputs.latent_dim + 4)
    return Traffic(base_traffic.read_bytes + part_bytes, base_traffic.write_bytes + part_bytes, launches=2)


def launch(of: Arguments) -> tuple[int, float, tuple[int, ...], dict[str, Any]]:
    """Computes a launch: the number of programs per split, the scale, the strides and the constants."""
    (B, H, D), latent_dim = of.q.shape, of.latent_dim
    constants = {
        "LATENT": latent_dim,
        "ROTARY": D - latent_dim,
        "BLOCK_LATENT": next_power_of_2(latent_dim),
        "BLOCK_ROTARY": max(16, next_power_of_2(D - latent_dim)),
        "BLOCK_SIZE": of.kv_cache.shape[1],
        "LN2": LN2,
        **of.config.launch_arguments,
    }
    strides = (*of.q.stride()[:2], *of.kv_cache.stride()[:2], of.block_table.stride(0))
    return B * cdiv(H, of.config.block_h), of.softmax_scale * LOG2E, strides, constants


@kernel(
    backend="triton",
    limits={"latent_dim": range(16, 513)},
    traffic=traffic,
    bind=launch,
    holds={"1 <= D - latent_dim <= 64": "1 to 64 rotary dimensions behind the latent"},
    fenced_since="3.7.1",
    tuning=Tuning(Config, CONFIG_SPACE, DEFAULT_CONFIGS, footprint),
    over="naive",
    shows={
        "": (
            "loop.wgmma + loop.mma > 0 and loop.cp_async >= loop.global_load; "
            "loop.cp_async > 0 and loop.global_store == 0"
        )
    },
)
def split_kv(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    latent_dim: int,
    softmax_scale: float,
    return_lse: bool,
    config: Config,
    bound: Any,
) -> None:
    """Computes decode attention.  Only the device reads the lengths.  Two runs agree bit for bit."""
    (B, H, _), (program_count, scale, strides, constant_args) = q.shape, bound
    splits = splits_of(q, kv_cache, block_table, config)
    partial_outs, partial_lse = out[None], None if lse is None else lse[None]
    if splits > 1:
        partial_outs = torch.empty((splits, B, H, latent_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, B, H), dtype=torch.float32, device=q.device)
    split_kv_kernel[(program_count * splits,)](
        q,
        kv_cache,
        block_table,
        seq_lens,
        partial_outs,
        partial_lse,
        H,
        scale,
        splits,
        *strides,
        *partial_outs.stride()[:3],
        *strides_of(partial_lse, 3),
        LSE=partial_lse is not None,
        **constant_args,
    )
    if splits > 1 and partial_lse is not None:
        lse = torch.empty_like(partial_lse[0]) if lse is None else lse
        program_count, scalar_args, constant_args = merge.launch(partial_outs, partial_lse, out, lse)
        merge.fused_kernel[(program_count,)](partial_outs, partial_lse, out, lse, *scalar_args, **constant_args)

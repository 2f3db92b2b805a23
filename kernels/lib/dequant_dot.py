"""Holds the common code of the kernels `gemm_w4a16/dequant_dot` and `gemm_w8a16/dequant_dot`.

The kernel computes the transposed result `W @ a.mT`, with the weight W as `[N, K]`.  Only the left operand of wgmma may
come from registers, so the weight is the left operand.  `_packed.py` orders the codes as a thread needs them.  So masks
and a subtraction turn them into bf16 without a shuffle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

WGMMA_ROWS = 64
"""The least number of rows of the weight that a warpgroup multiplies."""
BLOCK_K_8_BITS = 128
"""The number of values along K in a tile of eight-bit codes.  A tile of four-bit codes has one group along K."""
ADDRESS_REGISTERS = 24
SUM_TILE = 1024
"""The number of outputs of a CTA of the second launch, which adds the partial sums if K is split."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Holds tile sizes and launch options.  Along K, a tile has one group of four-bit codes, or 128 eight-bit codes."""

    block_m: int
    """The number of rows of `a` in a tile."""
    block_n: int
    """The number of rows of the weight in a tile."""
    num_warps: int
    num_stages: int
    split: int = 1
    """The number of CTAs that share a tile's K.  They write their sums to memory in fp32; a second launch adds them."""


def tuning(bits: int, block_k_of: Callable[[Scheme], int]) -> Tuning:
    """Returns the tuning for codes of `bits` bits.  The configs have tiles for one or two warpgroups and up to eight
    stages, and split K over up to eight CTAs.  `block_k_of` gives a tile's size along K by scheme (dtypes, group)."""
    rows_and_warps = [(64, 4), (128, 4), (128, 8)]

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
        size_sets = itertools.product((16, 32, 64, 128), rows_and_warps, (2, 3, 4, 6, 8), (1, 2, 4, 8))
        return tuple(Config(block_m, *weight_tile, stages, split) for block_m, weight_tile, stages, split in size_sets)

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        """Returns the registers for sums and codes, and the shared memory for the stages of codes and of `a`.  `a` has
        one more stage than the codes: wgmma reads `a` from its stage, while the next tile arrives."""
        M, N, K, block_k = int(case["M"]), int(case["N"]), int(case["K"]), block_k_of(scheme)
        cta_threads, tile_outputs = 32 * config.num_warps, config.block_m * config.block_n
        cta_registers = tile_outputs * (2 if bits == 4 else 1) + config.block_n * block_k // 4
        code_bytes, activation_bytes = config.block_n * block_k * bits // 8, 2 * config.block_m * block_k
        return Footprint(
            threads=cta_threads,
            registers=cta_registers // cta_threads + ADDRESS_REGISTERS,
            shared_bytes=(config.num_stages - 1) * code_bytes + config.num_stages * activation_bytes,
            ctas=cdiv(M, config.block_m) * cdiv(N, config.block_n) * config.split,
            tensor_flops=2.0 * tile_outputs * cdiv(cdiv(K, block_k), config.split) * block_k,
        )

    def rule(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
        """Returns whether each part of a split K has at least one tile."""
        has_enough_tiles = config.split == 1 or config.split <= cdiv(int(case["K"]), block_k_of(scheme))
        return has_enough_tiles

    def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
        """Chooses a tile with up to 128 rows of `a`.  Splits K until the CTAs fill the shared memory of all SMs."""
        M, N, block_k = int(case["M"]), int(case["N"]), block_k_of(scheme)
        block_m = next((block_rows for block_rows in (16, 32, 64) if M <= block_rows), 128)
        block_n = 64 if block_m <= 64 else 128
        num_stages = 8 if block_k == 32 else 6 if block_k == 64 or block_m <= 32 else 4
        tiles, k_steps = cdiv(M, block_m) * cdiv(N, block_n), cdiv(int(case["K"]), block_k)
        max_ctas = HOPPER_SMS * {16: 4, 32: 3, 64: 2, 128: 1}[block_m]
        split = 1
        while split < 8 and 2 * split * tiles <= max_ctas and 2 * split <= k_steps // 4:
            split *= 2
        return Config(block_m, block_n, 4 * block_n // WGMMA_ROWS, num_stages, split)

    return Tuning(Config, configs, heuristic, footprint, rule)


@triton.jit
def _two_of_four_bits(words, zero, SHIFT: tl.constexpr):
    # The bits go below 128 in bf16, whose last bit is worth 1; the difference is an integer of at most 5 bits: exact.
    code_pair = ((words >> SHIFT) & 0x000F000F) | 0x43004300
    low_code = code_pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high_code = (code_pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low_code - zero, high_code - zero)


@triton.jit
def _two_of_eight_bits(words, SHIFT: tl.constexpr):
    # The sign bit is worth -128; bf16 holds only the seven other bits below 128.
    value = ((words >> SHIFT) & 0x007F007F) | 0x43004300
    sign_bits = ((words >> SHIFT) & 0x00800080) | 0x43004300
    low_code = value.to(tl.int16).to(tl.bfloat16, bitcast=True) - sign_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high_code = (value >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) - (sign_bits >> 16).to(tl.int16).to(
        tl.bfloat16, bitcast=True
    )
    return tl.join(low_code, high_code)


@triton.jit
def _dequantize(words, zero, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Unpacks weight codes from words `[BLOCK_N, BLOCK_K * BITS / 32]`, and subtracts the zero point of 4-bit codes.
    Returns bf16 `[BLOCK_N, BLOCK_K]`, in order of K."""
    if BITS == 4:
        low_pairs = tl.join(_two_of_four_bits(words, zero, 0), _two_of_four_bits(words, zero, 4))
        high_pairs = tl.join(_two_of_four_bits(words, zero, 8), _two_of_four_bits(words, zero, 12))
        codes = tl.join(low_pairs, high_pairs).reshape(BLOCK_N, BLOCK_K // 32, 4, 2, 2, 2)  # t, e, h, s of `_packed.py`
        return codes.permute(0, 1, 5, 4, 2, 3).reshape(BLOCK_N, BLOCK_K)
    else:
        code_pairs = tl.join(_two_of_eight_bits(words, 0), _two_of_eight_bits(words, 8))
        return code_pairs.reshape(BLOCK_N, BLOCK_K // 16, 4, 2, 2).permute(0, 1, 4, 2, 3).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def _dot(
    a_ptr, words_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, M, N, K, row_words, stride_am, stride_sn, stride_om,
    BITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ZERO: tl.constexpr, SPLIT: tl.constexpr, WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    BLOCK_WORDS: tl.constexpr = BLOCK_K * BITS // 32
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_share = tl.program_id(0) % SPLIT
    tile_index = tl.program_id(0) // SPLIT
    # int64, because row * stride passes 2**31 from N * K = 2**31 words on.  Rows behind the last one read the last one.
    rows = (tile_index % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = (tile_index // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, column = tl.minimum(rows, N - 1), tl.minimum(columns, M - 1)
    k_offsets, word_offsets = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_WORDS)
    k_steps = tl.cdiv(K, BLOCK_K)
    first_k_step = k_share * tl.cdiv(k_steps, SPLIT)
    end_k_step = tl.minimum(first_k_step + tl.cdiv(k_steps, SPLIT), k_steps)
    a_ptrs = a_ptr + column[:, None] * stride_am + k_offsets[None, :] + first_k_step * BLOCK_K
    word_ptrs = words_ptr + row[:, None] * row_words + word_offsets[None, :] + first_k_step * BLOCK_WORDS
    group_offsets = row * stride_sn + first_k_step
    tile_sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if BITS == 8:
        channel_scale = tl.load(scale_ptr + row).to(tl.float32)[:, None]
    for k_step in range(first_k_step, end_k_step):
        if WHOLE_K:
            words = tl.load(word_ptrs, eviction_policy="evict_first")
            a = tl.load(a_ptrs)
        else:
            words = tl.load(word_ptrs, mask=(word_offsets < row_words - k_step * BLOCK_WORDS)[None, :], other=0)
            a = tl.load(a_ptrs, mask=(k_offsets < K - k_step * BLOCK_K)[None, :], other=0.0)
        if BITS == 8:
            # The dot has no accumulator, or Triton would let it run while the next step writes the registers that it
            # reads (3.7.1, WGMMAPipeline).
            tile_sums += tl.dot(_dequantize(words, 0, BITS, BLOCK_N, BLOCK_K), a.T) * channel_scale
        else:
            scale = tl.load(scale_ptr + group_offsets).to(tl.float32)
            if HAS_ZERO:
                zero = (tl.load(zero_ptr + group_offsets).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)[:, None]
            else:
                zero = tl.full((1, 1), 136.0, tl.bfloat16)  # 128 + 8
            group_sum = tl.dot(_dequantize(words, zero, BITS, BLOCK_N, BLOCK_K), a.T)
            tile_sums += group_sum * scale[:, None]
            group_offsets += 1
        a_ptrs += BLOCK_K
        word_ptrs += BLOCK_WORDS
    store_mask = (rows < N)[:, None] & (columns < M)[None, :]
    if SPLIT == 1:
        if HAS_BIAS:
            tile_sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        out_ptrs = out_ptr + columns[None, :] * stride_om + rows[:, None]
    else:
        out_ptrs = out_ptr + (k_share * tl.cast(M, tl.int64) + columns)[None, :] * N + rows[:, None]
    tl.store(out_ptrs, tile_sums.to(out_ptr.dtype.element_ty), mask=store_mask)


@triton.jit
def _add_up(
    parts_ptr, bias_ptr, out_ptr, M, N, stride_om, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    output_ids = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    result_size = tl.cast(M, tl.int64) * N
    output_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for k_share in tl.static_range(SPLIT):
        output_sum += tl.load(parts_ptr + k_share * result_size + output_ids, mask=output_ids < result_size, other=0.0)
    if HAS_BIAS:
        output_sum += tl.load(bias_ptr + output_ids % N, mask=output_ids < result_size, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + output_ids // N * stride_om + output_ids % N
    tl.store(out_ptrs, output_sum.to(out_ptr.dtype.element_ty), mask=output_ids < result_size)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the moved bytes.  `a` counts once.  The weight counts once per tile of rows of `a`, as if L2 did not keep
    it.  The partial sums of a split K count twice: written and read."""
    a, config = inputs.a, inputs.config
    M, N = a.shape[0], inputs.scale.shape[0]
    partial_bytes = 4 * config.split * M * N if config.split > 1 else 0
    weight = nbytes(inputs.b, inputs.scale, getattr(inputs, "zero", None))
    return Traffic(
        read_bytes=nbytes(a, inputs.bias) + max(cdiv(M, config.block_m), 1) * weight + partial_bytes,
        write_bytes=partial_bytes + M * N * a.element_size(),
        launches=1 if config.split == 1 else 2,
    )


def arranged(of: Arguments, bits: int, block_k: int) -> Any:
    """Computes the grid, the integer arguments and the constants of one launch, or of two launches if K is split."""
    a, b, c, config = of.a, of.b, of.c, of.config
    (M, K), N, split = a.shape, b.shape[0], of.config.split
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n) * split,)
    int_arguments = M, N, K, b.shape[1], a.stride(0) if M > 1 else 0, of.scale.stride(0), c.stride(0)
    has_bias = of.bias is not None
    constant_args = {
        "BITS": bits,
        "HAS_BIAS": has_bias and split == 1,
        "HAS_ZERO": getattr(of, "zero", None) is not None,
        "WHOLE_K": K % block_k == 0,
        "BLOCK_K": block_k,
        **config.launch_arguments,
    }
    sum_args = (cdiv(M * N, SUM_TILE),), (M, N, c.stride(0)), {"HAS_BIAS": has_bias, "SPLIT": split, "BLOCK": SUM_TILE}
    return grid, int_arguments, constant_args, sum_args if split > 1 else None


def launch(
    bound: Any, a: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, c: Tensor
) -> None:
    """Launches the kernel.  For a split K, a second kernel adds the partial sums.  `words` are the packed codes.
    `scale` and `zero` have equal strides and contiguous rows.
    """
    grid, int_arguments, constant_args, sum_args = bound
    if sum_args is None:
        _dot[grid](a, words, scale, zero, bias, c, *int_arguments, **constant_args)
        return
    partial_sums = torch.empty((constant_args["SPLIT"], *c.shape), dtype=torch.float32, device=c.device)
    _dot[grid](a, words, scale, zero, bias, partial_sums, *int_arguments, **constant_args)
    grid, int_arguments, constant_args = sum_args
    _add_up[grid](partial_sums, bias, c, *int_arguments, **constant_args)

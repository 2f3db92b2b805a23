"""Quantisers against theory, exact dequantisation, and checkpoints of GPTQ and AWQ built by an independent packer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_kernels import refuses

from rooflab.reference.quantization import (
    dequantize_int4,
    dequantize_int8,
    expected_mean_squared,
    pack_int4,
    quantization_error,
    quantize_int4,
    quantize_int8,
    unpack_int4,
)
from rooflab.reference.quantized_checkpoints import read_awq, read_gptq


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("bits", "zeros", "steps"), [(8, False, 254), (4, False, 14), (4, True, 15)])
def test_what_is_lost_is_what_a_uniform_quantiser_loses(bits: int, zeros: bool, steps: int) -> None:
    """20 log10(steps) dB for even values, by the steps over the whole range; s**2 / 12 for normal ones.

    The range of a group of 4096 is nearly that of the values.
    """
    even, bell = uniform(64, 4096), normal(256, 1024) + (1.0 if zeros else 0.0)

    def lost(weight: torch.Tensor, group: int) -> tuple[Any, torch.Tensor]:
        if bits == 8:
            codes, scale = quantize_int8(weight)
            return quantization_error(weight, dequantize_int8(codes, scale)), scale
        packed, scale, zero = quantize_int4(weight, group, zeros=zeros)
        return quantization_error(weight, dequantize_int4(packed, scale, zero, group=group)), scale

    assert lost(even, 4096)[0].sqnr_db == pytest.approx(20 * math.log10(steps), abs=0.1)
    for group in (32, 64, 128):
        error, scale = lost(bell, group)
        # The extremes of a group lie on a step, and lose nothing: one or two of its values.
        assert 0.9 < error.mean_squared / expected_mean_squared(scale) < 1.02
        assert error.relative == pytest.approx(10 ** (-error.sqnr_db / 20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("zeros", [False, True])
def test_no_value_errs_by_more_than_half_a_step_and_zeros_come_back(dtype: torch.dtype, zeros: bool) -> None:
    """Nor is one clipped, for scales are rounded up before codes are chosen with them."""
    weight = normal(16, 200) * 3 + 0.5
    weight[3] = 0.0
    packed, scale, zero = quantize_int4(weight, 64, zeros=zeros, dtype=dtype)
    assert scale.shape == (16, 4) and scale.dtype == dtype
    steps = scale.double().repeat_interleave(64, dim=1)[:, :200]
    found = dequantize_int4(packed, scale, zero, group=64)
    # A zero point is itself rounded: the ends of a range may then lie a little beyond the codes.
    assert ((found - weight.double()).abs() <= steps * (1.0 if zeros else 0.5) * (1 + 1e-6)).all() and not found[
        3
    ].any()
    codes, scale8 = quantize_int8(weight, dtype)
    found = dequantize_int8(codes, scale8)
    assert ((found - weight.double()).abs() <= 0.5 * scale8.double()[:, None] * (1 + 1e-6)).all()
    assert not codes[3].any() and scale8[3] == 1 and quantization_error(weight[3:4], found[3:4]).sqnr_db == math.inf


def test_packing_by_hand() -> None:
    codes = torch.tensor([[1, 2, 15, 0]])
    packed = pack_int4(codes)
    assert packed.tolist() == [[0x21, 0x0F]] and unpack_int4(packed).tolist() == codes.tolist()
    scale, zero = torch.tensor([[0.5, 2.0]]), torch.tensor([[1, 15]], dtype=torch.uint8)
    assert dequantize_int4(packed, scale, group=2).tolist() == [[-3.5, -3.0, 14.0, -16.0]]
    assert dequantize_int4(packed, scale, zero, group=2).tolist() == [[0.0, 0.5, 0.0, -30.0]]


def word(values: list[int]) -> int:
    """Eight values as a signed 32-bit integer, the first in the lowest bits."""
    total = sum(value << 4 * place for place, value in enumerate(values))
    return total - 2**32 if total >= 2**31 else total


def gptq_tensors(codes, zeros, v1: bool):
    """As the format is described: codes (K, N) eight along K a word, zero points (G, N) eight along N, less one."""
    (K, N), G = codes.shape, zeros.shape[0]
    qweight = [[word([int(codes[8 * i + j, n]) for j in range(8)]) for n in range(N)] for i in range(K // 8)]
    stored = [[(int(zeros[g, n]) - v1) % 16 for n in range(N)] for g in range(G)]
    qzeros = [[word(stored[g][8 * j : 8 * j + 8]) for j in range(N // 8)] for g in range(G)]
    return torch.tensor(qweight, dtype=torch.int32), torch.tensor(qzeros, dtype=torch.int32)


def awq_word(values: list[int]) -> int:
    """Eight neighbours along N: the even ones in the low half of the word, the odd ones in the high half."""
    return word([values[n] for n in (0, 2, 4, 6, 1, 3, 5, 7)])


def awq_tensors(codes, zeros):
    rows = lambda table: [
        [awq_word([int(value) for value in row[8 * j : 8 * j + 8]]) for j in range(len(row) // 8)] for row in table
    ]
    return torch.tensor(rows(codes), dtype=torch.int32), torch.tensor(rows(zeros), dtype=torch.int32)


def layer(K: int, N: int, group: int, symmetric: bool = False):
    """Codes (K, N), zero points and fp16 scales (G, N), and the weight (N, K) that they stand for."""
    generator = torch.Generator().manual_seed(K + N + group)
    groups = -(-K // group)
    codes = torch.randint(0, 16, (K, N), generator=generator)
    zeros = torch.full((groups, N), 8) if symmetric else torch.randint(0, 16, (groups, N), generator=generator)
    zeros[0, 0] = 8 if symmetric else 0
    scales = torch.rand(groups, N, generator=generator).half()
    of = torch.arange(K) // group
    return codes, zeros, scales, ((codes - zeros[of]).double() * scales.double()[of]).mT


def dequantized(read) -> torch.Tensor:
    return dequantize_int4(read.b, read.scale, read.zero, group=read.group)


SIZES = pytest.mark.parametrize(("K", "N", "group"), [(128, 16, 32), (256, 8, 128), (160, 24, 64)])


@pytest.mark.parametrize("version", ["gptq", "gptq_v2", "awq"])
@SIZES
def test_a_checkpoint_comes_back_bit_for_bit(version: str, K: int, N: int, group: int) -> None:
    codes, zeros, scales, weight = layer(K, N, group)
    assert zeros[0, 0] == 0  # stored as 15 in the first version of GPTQ
    if version == "awq":
        read = read_awq(*awq_tensors(codes, zeros), scales, group=group)
    else:
        tensors, g_idx = gptq_tensors(codes, zeros, v1=version == "gptq"), torch.arange(K) // group
        read = read_gptq(*tensors, scales, g_idx, group=group, checkpoint_format=version)
    assert torch.equal(unpack_int4(read.b).long(), codes.mT) and torch.equal(read.zero.long(), zeros.mT)
    assert read.scale.dtype == torch.float16 and torch.equal(read.scale, scales.mT) and read.order is None
    assert torch.equal(dequantized(read), weight)


def test_symmetric_gptq_has_no_zero_points() -> None:
    codes, zeros, scales, weight = layer(64, 8, 32, symmetric=True)
    read = read_gptq(*gptq_tensors(codes, zeros, v1=True), scales, group=32)
    assert read.zero is None and torch.equal(dequantized(read), weight)
    for v1, label, other in ((True, "gptq_v2", "gptq"), (False, "gptq", "gptq_v2")):
        with pytest.raises(ValueError, match=f"checkpoint_format: expected {other} where all zero points"):
            read_gptq(*gptq_tensors(codes, zeros, v1=v1), scales, group=32, checkpoint_format=label)


def test_act_order_comes_back_sorted_with_its_order() -> None:
    """Channels of one group lie anywhere; sorted they are what a product of reordered activations needs."""
    K, N, group = 128, 8, 32
    codes, zeros, scales, _ = layer(K, N, group)
    g_idx = (torch.arange(K) // group)[torch.randperm(K, generator=torch.Generator().manual_seed(1))]
    weight = ((codes - zeros[g_idx]).double() * scales.double()[g_idx]).mT
    read = read_gptq(*gptq_tensors(codes, zeros, v1=True), scales, g_idx.int(), group=group)
    assert torch.equal(dequantized(read), weight[:, read.order])
    a = normal(3, K).double()
    torch.testing.assert_close(a[:, read.order] @ dequantized(read).mT, a @ weight.mT)
    with pytest.raises(ValueError, match="g_idx: expected each of the groups 32 times"):
        read_gptq(*gptq_tensors(codes, zeros, v1=True), scales, torch.zeros(K, dtype=torch.int32), group=group)


@pytest.mark.parametrize(("K", "group"), [(96, -1), (96, 128), (200, -1), (200, 200), (512, -1), (512, 256)])
def test_a_wide_group_is_one_of_128_or_several(K: int, group: int) -> None:
    """A group that holds all of K, as long as K is: of 128, the last one short."""
    length = group if 0 < group < K else K
    codes, zeros, scales, weight = layer(K, 8, length)
    for read in (
        read_awq(*awq_tensors(codes, zeros), scales, group=group),
        read_gptq(*gptq_tensors(codes, zeros, v1=True), scales, torch.arange(K) // length, group=group),
    ):
        assert read.group == 128 and read.scale.shape == (8, -(-K // 128)) and read.order is None
        assert torch.equal(dequantized(read), weight)


def test_what_does_not_fit_is_refused_by_its_name() -> None:
    codes, zeros, scales, _ = layer(64, 8, 32)
    checkpoints = (read_gptq, gptq_tensors(codes, zeros, v1=True)), (read_awq, awq_tensors(codes, zeros))
    for read, (qweight, qzeros) in checkpoints:
        changes = [
            ({"checkpoint_format": "marlin"}, "checkpoint_format: expected gptq or gptq_v2, got 'marlin'"),
            ({"qweight": qweight.long()}, "qweight: expected int32"),
            ({"group": 64}, "qzeros: expected shape"),
            ({"scales": scales.mT}, "scales: expected shape"),
            ({"group": 48}, "group: expected one of 32, 64, 128"),
            ({"g_idx": torch.zeros(8)}, "g_idx: expected shape"),
        ]
        given = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "group": 32}
        refuses(read, given.copy, changes)
    changes = [
        ({"weight": torch.ones(2, 3)}, "weight: expected an even K"),
        ({"group": 0}, "group: expected a positive"),
    ]
    refuses(quantize_int4, lambda: {"weight": torch.ones(2, 4), "group": 32}, changes)
    refuses(quantize_int8, lambda: {}, [({"weight": torch.ones(4)}, "weight: expected shape")])

"""gemm_gguf: the formula by hand, rows that no 16-bit integers represent, and that activations keep 16 bits."""

from __future__ import annotations

import pytest
import torch

from rooflab.kernels.registry import get_kernel
from rooflab.reference.gemm_gguf import gemm_gguf
from rooflab.reference.quantization import dequantize_groups, pack_int4, quantize_groups

NATIVE = get_kernel("gemm_gguf", "native")
FORMS = [(4, False, 32), (4, True, 32), (8, False, 32), (8, True, 16)]
"""Bits, minimums and group."""


def coded(bits, minimums, group, N=40, K=64, seed=0):
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    return quantize_groups(weight, group, bits, minimums=minimums)


def test_the_reference_by_hand() -> None:
    """The second group of 16 has codes of 15 and a scale of 100; int8 codes are signed."""
    a = torch.ones(1, 32, dtype=torch.bfloat16)
    codes, scale = torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[1.0, 100.0]])
    codes[0, 16:] = 15
    minimum = torch.tensor([[2.0, 3.0]])
    assert gemm_gguf(a, pack_int4(codes), scale).tolist() == [[16 * (-8 + 700)]]
    assert gemm_gguf(a, pack_int4(codes), scale, minimum).tolist() == [[16 * (-2 + 1500 - 3)]]
    assert gemm_gguf(a, (codes - 20).to(torch.int8), scale, minimum).tolist() == [[16 * (-20 - 2 - 500 - 3)]]
    with pytest.raises(ValueError, match="b: expected 16 columns of torch.uint8 for K=32, got 32"):
        gemm_gguf(a, codes, scale)
    with pytest.raises(ValueError, match="scale: expected a scale for each 16 or 32 of K=32, got 4 groups"):
        gemm_gguf(a, pack_int4(codes), torch.ones(1, 4))


@pytest.mark.parametrize(("bits", "minimums", "group"), FORMS)
def test_quantised_groups_are_within_half_a_step(bits, minimums, group) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    codes, scale, minimum = quantize_groups(weight, group, bits, minimums=minimums)
    error = (dequantize_groups(codes, scale, minimum) - weight).abs().view(8, -1, group).amax(2)
    rounded_minimum = 0.0 if minimum is None else minimum.double().abs() * 2.0**-11 + 2.0**-25
    assert (error <= 0.5001 * scale.double() + rounded_minimum).all() and (error.max() > 0.3 * scale.max())
    assert (minimum is not None) == minimums and codes.dtype == (torch.uint8 if bits == 4 else torch.int8)
    with pytest.raises(ValueError, match="weight: expected rows of a multiple of 32 values, got 33"):
        quantize_groups(torch.ones(1, 33), 32, bits)


@pytest.mark.parametrize("M", (1, 3, 17))
@pytest.mark.parametrize(("bits", "minimums", "group"), FORMS)
@pytest.mark.needs("C++ compiler")
def test_a_row_with_inf_nan_or_tiny_values_does_not_disturb_the_others(bits, minimums, group, M) -> None:
    codes, scale, minimum = coded(bits, minimums, group)
    packed = NATIVE.prepare(codes, scale, minimum)
    a = torch.randn(M, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = NATIVE.fn(a, packed, scale, minimum, None)
    for value in (float("inf"), float("nan"), 1e-38):
        a[0, 5] = value
        if value == 1e-38:
            a[0] *= 1e-38
        result = NATIVE.fn(a, packed, scale, minimum, None)
        torch.testing.assert_close(result[1:], plain[1:], rtol=2.0**-7, atol=1e-3)  # they may take its fp32 path
        oracle = gemm_gguf(a, codes, scale, minimum)[0]
        assert result[0].isfinite().equal(oracle.isfinite())
        if oracle.isfinite().all():
            assert ((result[0].double() - oracle).abs() <= 2.0**-8 * oracle.abs() + 1e-39).all()


@pytest.mark.needs("C++ compiler")
def test_a_minimum_keeps_its_dtype_and_a_weight_may_have_no_rows() -> None:
    codes, scale, minimum = coded(4, True, 32)
    assert minimum is not None
    a = torch.ones(1, 64, dtype=torch.bfloat16)
    wide = minimum.float() + 1e5
    result = NATIVE.fn(a, NATIVE.prepare(codes, scale, wide), scale, wide, None)
    torch.testing.assert_close(result.double(), gemm_gguf(a, codes, scale, wide), rtol=2.0**-7, atol=1e-3)
    none = NATIVE.prepare(codes[:0], scale[:0], None)
    assert NATIVE.fn(a, none, scale[:0], None, None).shape == (1, 0)


@pytest.mark.needs("C++ compiler")
def test_small_activations_beside_a_large_one_keep_16_bits_of_it() -> None:
    """One activation of 1 and 31 of 2**-9: with 8 bits, as in llama.cpp, these would be 0."""
    a = torch.full((1, 32), 2.0**-9, dtype=torch.bfloat16)
    a[0, 0] = 1.0
    codes = torch.full((1, 32), 100, dtype=torch.int8)
    codes[0, 0] = 0
    scale = torch.ones(1, 1, dtype=torch.float16)
    result = NATIVE.fn(a, NATIVE.prepare(codes, scale, None), scale, None, None)
    assert float(result) == pytest.approx(3100 / 512, rel=0.01)

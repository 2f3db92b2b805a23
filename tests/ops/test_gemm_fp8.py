"""gemm_fp8: quantisation, and the reason for promoted sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from op_kernels import META, python_without_interpreter

from rooflab.kernels.registry import get_kernel
from rooflab.reference.gemm_fp8 import SPEC, dequantize_fp8, quantize_fp8
from rooflab.reference.spec import SCHEMES, Case

E4M3, FP8 = torch.float8_e4m3fn, SCHEMES["fp8_e4m3"]


@pytest.mark.parametrize("group", [None, (1, 128), (128, 128)])
def test_quantised_values_times_scales_are_the_values(group):
    x = torch.randn(130, 300, generator=torch.Generator().manual_seed(0)) * 3
    values, scale = quantize_fp8(x, group)
    assert values.dtype == E4M3 and scale.dtype == torch.float32 and values.is_contiguous()
    assert scale.shape == {None: (), (1, 128): (130, 3), (128, 128): (2, 3)}[group]
    error = (dequantize_fp8(values, scale, group or (1, 1)) - x).abs()
    step = scale.max().double() * 2.0**-9  # e4m3's smallest magnitude
    assert (error <= x.abs() / 16 * 1.001 + step).all()
    assert values.float().abs().max() == 448


def test_each_group_is_scaled_by_its_own_largest_value():
    x = torch.ones(2, 256)
    x[1, 128:] = 7.0
    x[0, :128] = 0.0
    values, scale = quantize_fp8(x, (1, 128))
    torch.testing.assert_close(scale, torch.tensor([[1.0, 1 / 448], [1 / 448, 7 / 448]]))
    assert values[0, :128].float().abs().max() == 0 and (values[1].float() == 448).all()
    assert quantize_fp8(torch.empty(3, 0))[1].item() == 1.0


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("N=90,K=256,scales=tensor,bias=false", "multiples of 16"),
        ("N=96,K=384,scales=block,bias=false", "K in multiples of 512"),
        ("N=96,K=512,scales=block,bias=true", "bias: expected none"),
    ],
)
def test_the_library_refuses_what_cublaslt_lacks(sizes, words):
    inputs = SPEC.make_inputs(SPEC.check_case(Case.parse(f"M=17,{sizes}")), FP8, META, 0)
    assert words in str(get_kernel("gemm_fp8", "library").why_not_args(inputs))


@pytest.mark.more
def test_a_short_sum_is_off_at_a_large_k_and_promoted_ones_are_not():
    """The compiled kernels, with the emulator's model of Hopper's accumulator: 14 bits, cut towards zero."""
    case = "M=64,N=16,K=8192,scales=tensor,bias=false,fast_accum=true"
    script = str(Path(__file__).with_name("short_accumulator.py"))
    off = json.loads(python_without_interpreter(script, "gemm_fp8", case, "fast_accum", "promoted", "promoted_ws"))
    assert off.pop("fast_accum") > 1 and max(off.values()) < 0.6

"""gemm_fp8: quantisation, what TMA cannot read, why sums are promoted, footprints, cost."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from op_kernels import CPU, META, each, python_without_interpreter, slow
from test_configs import compare_with_compiled

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core.select import Selection
from rooflab.bench.emulate.calls import call
from rooflab.kernels.registry import Kernel, get_kernel, get_op, kernels
from rooflab.reference.gemm_fp8 import DEEPSEEK_V3, SPEC, dequantize_fp8, quantize_fp8
from rooflab.reference.spec import SCHEMES, Case

E4M3, FP8 = torch.float8_e4m3fn, SCHEMES["fp8_e4m3"]
ALL = list(kernels("gemm_fp8").values())
RUNGS = [kernel for kernel in ALL if kernel.role == "optimized"]
BLOCK = Case(M=130, N=144, K=400, scales="block", bias=True)


def made(case: Case, device: torch.device = CPU) -> dict[str, object]:
    return SPEC.make_inputs(case, FP8, device, 0)


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
    with pytest.raises(ValueError, match=r"x: expected shape \(\*, \*\), got \(3,\)"):
        quantize_fp8(torch.ones(3))


ROWS_OF_K = "stride 1 along K, in rows that do not overlap, at multiples of 16 bytes"


@each(RUNGS)
def test_what_tma_cannot_read_is_refused_by_name(kernel: Kernel) -> None:
    inputs = {**made(Case(M=4, N=8, K=32, scales="tensor", bias=False)), "fast_accum": True}
    assert kernel.why_not_args(inputs) is None
    rows = f"UNSUPPORTED: gemm_fp8/{kernel.name}: a: expected {ROWS_OF_K}"
    wide = torch.empty(4, 40).to(E4M3)[:, :32]
    assert str(kernel.why_not_args({**inputs, "a": wide})).startswith(rows)
    in_rows = inputs["b"].contiguous()
    assert f"b: expected {ROWS_OF_K}" in str(kernel.why_not_args({**inputs, "b": in_rows}))
    moved = torch.empty(4 * 32 + 1).to(E4M3)[1:].view(4, 32)
    assert "address % 16 = 1; gemm_fp8/" in str(kernel.why_not_args({**inputs, "a": moved}))
    one_row = inputs["a"][:1].expand(4, 32)
    assert f"a: expected {ROWS_OF_K}" in str(kernel.why_not_args({**inputs, "a": one_row}))
    with pytest.raises(ValueError, match="a: expected stride 1 along K.* gemm_fp8/.* takes it"):
        kernel.fn(**{**inputs, "a": wide})


def test_a_short_sum_must_be_allowed_and_has_no_blocks():
    kernel = get_kernel("gemm_fp8", "fast_accum")
    for case, reason in (
        (Case(M=4, N=8, K=32, scales="tensor", bias=False), "fast_accum: expected True"),
        (Case(M=4, N=8, K=32, scales="block", bias=False, fast_accum=True), "a_scale: expected one element"),
    ):
        assert reason in str(kernel.why_not_args(made(case)))
        with pytest.raises(ValueError, match=reason):
            kernel.fn(**made(case))


def test_what_the_library_takes_on_a_gpu() -> None:
    for case, reason in [
        (Case(M=17, N=96, K=256, scales="tensor", bias=True), None),
        (Case(M=17, N=96, K=512, scales="block", bias=False), None),
        (Case(M=17, N=90, K=256, scales="tensor", bias=True), "multiples of 16 for cuBLASLt, got 90 and 256"),
        (Case(M=17, N=96, K=384, scales="block", bias=False), "K in multiples of 512 with block scales"),
        (Case(M=17, N=96, K=512, scales="block", bias=True), "bias: expected none with block scales"),
    ]:
        kernel, inputs = get_kernel("gemm_fp8", "library"), made(case, META)
        found = kernel.why_not_args(inputs)
        assert found is None if reason is None else reason in str(found)
        if reason is None:
            apart = torch.empty((17, case["K"] + 8), dtype=E4M3, device=META)[:, : case["K"]]
            assert f"a: expected {ROWS_OF_K}" in str(kernel.why_not_args({**inputs, "a": apart}))
            assert f"b: expected {ROWS_OF_K}" in str(kernel.why_not_args({**inputs, "b": inputs["b"].contiguous()}))


def test_deep_gemm_is_given_its_own_form(monkeypatch):
    given = []
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=lambda *args: given.extend(args)))
    inputs = made(BLOCK.but(bias=False))
    out = get_kernel("gemm_fp8", "deep_gemm").fn(**inputs)
    (a, a_scale), (weight, b_scale), result = given
    assert result is out and a is inputs["a"] and weight.shape == (144, 400) and weight.is_contiguous()
    assert a_scale.shape == (130, 4) and a_scale.stride() == (1, 130)
    assert b_scale.shape == (2, 4) and b_scale.is_contiguous()
    assert {(case["N"], case["K"]) for case in SPEC.cases["deepseek_v3"]} == set(DEEPSEEK_V3)


@pytest.mark.more
def test_a_short_sum_is_off_at_a_large_k_and_promoted_ones_are_not():
    """The compiled kernels, with the emulator's model of Hopper's accumulator: 14 bits, cut towards zero."""
    case = "M=64,N=16,K=8192,scales=tensor,bias=false,fast_accum=true"
    script = str(Path(__file__).with_name("short_accumulator.py"))
    off = json.loads(python_without_interpreter(script, "gemm", case, "fast_accum", "promoted", "promoted_ws"))
    wrong, right = off.pop("fast_accum"), off.values()
    assert wrong.pop("over tolerance") > 1 and all(found.pop("over tolerance") < 0.6 for found in right)
    # The bar of the suite: no more than twice the errors of fp32 sums.
    assert max(wrong.values()) > 5 and max(ratio for found in right for ratio in found.values()) < 2


@pytest.mark.more
@pytest.mark.parametrize(
    ("config", "case"),
    [
        ((192, 128, 3), Case(M=200, N=264, K=272, scales="block", bias=True)),
        # More tiles than SMs, so that CTAs go round, and an odd N, which TMA cannot store.
        slow((128, 16, 3), Case(M=64, N=2233, K=144, scales="tensor", bias=False)),
    ],
)
def test_persistent_ctas_of_every_size_are_right_and_race_free(config: tuple[int, ...], case: Case) -> None:
    made_of = get_kernel("gemm_fp8", "promoted_ws").tuning.config_type(*config)
    answer = call(KernelCase("gemm_fp8", "promoted_ws", case, FP8, None, made_of)).answer
    assert answer["status"] == "OK", answer["reason"]
    (launch,) = answer["launches"]
    assert launch["shared_wavefronts"] == launch["shared_wavefronts_least"], "no bank conflicts"


@pytest.mark.more
@each([RUNGS[0], *map(slow, RUNGS[1:])])
def test_footprints_are_those_of_the_compiled_code(kernel: Kernel) -> None:
    case = Case(M=512, N=512, K=512, scales="tensor", bias=False, fast_accum=True)
    for info in compare_with_compiled([("gemm_fp8", kernel.name, case)], lambda configs: configs[:1], FP8):
        by_tma = info.backend == "cuda" or "async_tma_copy_local_to_global" in info.ir
        assert by_tma or re.search(r"arith\.muli %\w+, %\w+ : tensor<\d+(x1)?xi64", info.ir), "rows times their stride"


def test_cost_and_traffic_count_bytes_of_fp8():
    case = Case(M=4096, N=1024, K=512, scales="block", bias=True)
    inputs = made(case, META)
    cost = get_op("gemm_fp8").cost_of(inputs)
    assert cost.tensor_flops == {"fp8_e4m3": 2 * 4096 * 1024 * 512} and cost.vector_flops == 4096 * 1024
    scales = 4 * (4096 * 4 + 4 * 8)
    assert cost.read_bytes == 4096 * 512 + 512 * 1024 + scales + 2 * 1024 and cost.write_bytes == 2 * 4096 * 1024
    naive, library, promoted = (
        get_kernel("gemm_fp8", name).traffic_of(inputs) for name in ("naive", "library", "promoted")
    )
    assert library.bytes == cost.bytes and naive.bytes > 17 * (4096 * 512 + 512 * 1024) and naive.launches == 11
    assert promoted.read_bytes - library.read_bytes == (4096 // (128 * 8) - 1) * 512 * 1024


def test_its_first_scheme_is_taken():
    alone = Selection.of("gemm_fp8", None, ("smoke",), None, None, "cpu")
    assert [scheme.name for scheme in alone.schemes_of(SPEC, "fp32")] == ["fp8_e4m3"]
    every = Selection.of(None, None, ("smoke",), None, None, "cpu")
    assert every.schemes_of(SPEC, "fp32") == []
    asked = Selection.of("gemm_fp8", None, ("smoke",), None, ["fp32"], "cpu")
    assert asked.schemes_of(SPEC, "fp32") == []

"""What was asked of the compiler is held against the code of kernels compiled with no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rooflab.bench.compile.static import CompiledInfo, CompileFailure, Request, compile_kernels
from rooflab.bench.compile.summary import dots, options, summarize
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.device import get_device

KERNELS = """
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from rooflab.kernels.registry import register

@triton.jit
def by_tma(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPECIALIZE: tl.constexpr):
    m, n = tl.program_id(0), tl.program_id(1)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=SPECIALIZE, num_stages=3):
        acc = tl.dot(a.load([m * BM, k]), b.load([n * BN, k]).T, acc)
    c.store([m * BM, n * BN], acc.to(c.dtype))

def launch_tma(a, b, num_warps, specialize):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    maps = [TensorDescriptor.from_tensor(x, [rows, 64]) for x, rows in ((a, 64), (b.T, 128))]
    maps.append(TensorDescriptor.from_tensor(c, [64, 128]))
    by_tma[(a.shape[0] // 64, b.shape[1] // 128)](
        *maps, a.shape[1], 64, 128, 64, specialize, num_warps=num_warps)
    return c

@register(op="gemm", name="test_specialized", role="optimized", backend="triton")
def specialized(a, b, bias=None):
    return launch_tma(a, b, 4, True)

@register(op="gemm", name="test_ignored", role="optimized", backend="triton")
def ignored(a, b, bias=None):
    return launch_tma(a, b, 8, True)

@register(op="gemm", name="test_two_warps", role="optimized", backend="triton")
def two_warps(a, b, bias=None):
    return launch_tma(a, b, 2, False)

@triton.jit
def product(a, b, c, K, N, PRECISION: tl.constexpr):
    i = tl.arange(0, 64)
    acc = tl.zeros((64, 64), tl.float32)
    for k in range(0, K, 64):
        x = tl.load(a + i[:, None] * K + k + i[None])
        acc = tl.dot(x, tl.load(b + (k + i)[:, None] + i[None] * K), acc, input_precision=PRECISION)
    tl.store(c + i[:, None] * N + i[None], acc)

def launch_product(a, b, **options):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    product[(1,)](a, b, c, a.shape[1], b.shape[1], **options)
    return c

@register(op="gemm", name="test_default", role="optimized", backend="triton")
def default(a, b, bias=None):
    return launch_product(a, b, PRECISION=None)

@register(op="gemm", name="test_ieee", role="optimized", backend="triton")
def ieee(a, b, bias=None):
    return launch_product(a, b, PRECISION="ieee", num_stages=1, maxnreg=64)

@register(op="gemm", name="test_three_products", role="optimized", backend="triton")
def three(a, b, bias=None):
    return launch_product(a, b, PRECISION="tf32x3")

@triton.jit
def halve(x, y, n, BLOCK: tl.constexpr):
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) * 0.5, mask=at < n)

def result(x):
    return torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)

@register(op="silu_and_mul", name="test_staged", role="optimized", backend="triton")
def staged(x):
    out = result(x)
    halve[(1,)](x, out, out.numel(), 1024, num_stages=4)
    return out

@triton.jit
def straight_halve(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * 0.5)

@register(op="silu_and_mul", name="test_straight", role="optimized", backend="triton")
def straight(x):
    out = result(x)
    straight_halve[(out.numel() // 1024,)](x, out, 1024, num_stages=2)
    return out
"""
GEMM = Case(M=128, N=256, K=256, layout="NT", bias=False)
SILU = Case(T=64, I=1024)
WANTED = [
    *(("gemm", name, GEMM, "bf16", "sm_90a") for name in ("specialized", "ignored", "two_warps")),
    *(("gemm", name, GEMM, "fp32", "sm_90a") for name in ("default", "ieee", "three_products")),
    ("gemm", "specialized", GEMM, "bf16", "sm_80"),
    ("gemm", "specialized", GEMM, "bf16", "sm_100a"),
    *(("silu_and_mul", name, SILU, "bf16", "sm_90a") for name in ("staged", "straight")),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[CompiledInfo] | CompileFailure]:
    """Everything that the tests below look at, by kernel and target, compiled once."""
    file: Path = tmp_path_factory.mktemp("kernels") / "mine.py"
    file.write_text(KERNELS)
    requests = [
        Request(op, f"test_{name}", case, SCHEMES[scheme], file, None, target)
        for op, name, case, scheme, target in WANTED
    ]
    results = compile_kernels(requests)
    return {(name, target): result for (_, name, _, _, target), result in zip(WANTED, results, strict=True)}


def only(found, name: str, target: str = "sm_90a") -> CompiledInfo:
    result = found[name, target]
    assert not isinstance(result, CompileFailure), result
    (info,) = result
    return info


def told(info: CompiledInfo, scheme: str = "bf16") -> dict[str, tuple[bool, str]]:
    return {option.name: (option.took_effect, option.sentence) for option in options(info, scheme)}


def test_warp_specialization_that_took_effect(found):
    info = only(found, "specialized")
    effect, sentence = told(info)["warp specialization"]
    assert effect and (info.num_warps, info.threads) == (4, 384)
    assert "384 threads at num_warps=4" in sentence and "registers move" in sentence


def test_warp_specialization_that_is_silently_ignored(found):
    effect, sentence = told(only(found, "ignored"))["warp specialization"]
    assert not effect and "256 threads at num_warps=8, no more" in sentence


def test_specialised_warps_feed_the_hot_loop(found):
    summary = summarize(only(found, "specialized"), "bf16", get_device("h100"))
    assert summary.loop.counts["wgmma"] >= 1 and "tma" not in summary.loop.counts
    assert summary.loop.fed_by["tma"] == 2 and summary.in_loop["tma"] == 2
    plain = summarize(only(found, "ignored"), "bf16", get_device("h100"))
    assert plain.loop.counts["tma"] == 2 and not plain.loop.fed_by, "one loop does both"


def test_wgmma_expected_and_absent(found):
    there, sentence = told(only(found, "specialized"))["wgmma"]
    assert there and "64 rows in bf16" in sentence
    effect, sentence = told(only(found, "two_warps"))["wgmma"]
    assert not effect and "no wgmma instruction; num_warps=2 is less than a warpgroup's 4" in sentence
    assert "wgmma" not in told(only(found, "specialized", "sm_80")), "an A100 has none to expect"


def test_tma_asked_for_and_absent(found):
    effect, sentence = told(only(found, "specialized"))["TMA"]
    assert effect and "tt.descriptor_load" in sentence
    info = only(found, "specialized", "sm_80")
    effect, sentence = told(info)["TMA"]
    assert not effect and "has none" in sentence and info.target == "sm_80"


def test_a_depth_of_pipeline_without_asynchronous_copies(found):
    effect, sentence = told(only(found, "specialized"))["pipelining"]
    assert effect and "num_stages=3 was asked for" in sentence and "(TMA)" in sentence
    effect, sentence = told(only(found, "staged"))["pipelining"]
    assert not effect and "num_stages=4 was asked for, and the code has no asynchronous copy" in sentence
    effect, sentence = told(only(found, "straight"))["pipelining"]
    assert not effect and sentence == "num_stages=2 was asked for, and the code has no loop to pipeline"


def test_tf32_where_fp32_was_meant(found):
    info = only(found, "default")
    effect, sentence = told(info, "fp32")["precision fp32"]
    assert not effect and info.uses_tf32 and "rounded to TF32 by tl.dot's default" in sentence
    assert "precision fp32" not in told(info, "bf16"), "where fp32 was not meant"


def test_ieee_precision_is_held_to(found):
    info = only(found, "ieee")
    effect, sentence = told(info, "fp32")["precision ieee"]
    assert effect and not info.uses_tf32 and "no TF32" in sentence and info.counts["fma"] > 0


def test_a_split_precision_is_no_rounding(found):
    info = only(found, "three_products")
    effect, _ = told(info, "fp32")["precision tf32x3"]
    assert effect and info.uses_tf32 and "precision fp32" not in told(info, "fp32")


def test_a_register_limit(found):
    info = only(found, "ieee")
    effect, sentence = told(info, "fp32")["maxnreg"]
    assert effect and info.registers <= 64 and "maxnreg=64 was asked for" in sentence
    assert not told(replace(info, registers=65), "fp32")["maxnreg"][0]


def test_wgmma_that_the_assembler_serialized(found):
    info = only(found, "specialized")
    assert "asynchronous wgmma" not in told(info)
    said = "(C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    effect, sentence = told(replace(info, warnings=(said,)))["asynchronous wgmma"]
    assert not effect and said in sentence


def test_a_cluster(found):
    info = replace(only(found, "straight"), asked={"num_ctas": 2}, ptx=".reqnctapercluster 2, 1, 1")
    assert told(info)["cluster"] == (True, "num_ctas=2 was asked for: the PTX has clusters of 2")
    assert told(replace(info, ptx=""))["cluster"] == (False, "num_ctas=2 was asked for: the PTX has no cluster")


def test_blackwell_has_tensor_cores_of_its_own(found):
    info = only(found, "specialized", "sm_100a")
    assert info.target == "sm_100a" and info.uses_tensor_cores and not info.uses_wgmma
    assert told(info)["tcgen05"][0] and summarize(info, "bf16", get_device("b200")).tensor_path == "tcgen05"


def test_dots_are_read_in_all_their_forms():
    ir = """
    %1 = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<128x64xbf16> * tensor<64x32xbf16> -> tensor<128x32xf32>
    %2 = tt.dot %a, %b, %c : tensor<2x16x64xf32, #op> * tensor<2x64x32xf32, #op> -> tensor<2x16x32xf32, #mma>
    %3 = ttng.warp_group_dot %a, %b, %c {inputPrecision = 0 : i32} : !ttg.memdesc<64x16xf16, #s, #smem> * !ttg.memdesc<16x8xf16, #s, #smem> -> tensor<64x8xf32, #mma>
    """  # noqa: E501
    assert [(dot.rows, dot.dtype, dot.precision) for dot in dots(ir)][:2] == [
        (128, "bf16", "tf32"),
        (16, "f32", "ieee"),
    ]
    gluon = dots(ir)[2]
    assert (gluon.rows, gluon.dtype, gluon.precision) == (64, "f16", "tf32")

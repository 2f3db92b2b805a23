"""Compiler options are compared with the code of kernels that were compiled with no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.static import CompiledInfo, CompileFailure, compile_kernels
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

for name, call in {
    "specialized": lambda a, b, bias=None: launch_tma(a, b, 4, True),
    "ignored": lambda a, b, bias=None: launch_tma(a, b, 8, True),
    "two_warps": lambda a, b, bias=None: launch_tma(a, b, 2, False),
    "default": lambda a, b, bias=None: launch_product(a, b, PRECISION=None),
    "ieee": lambda a, b, bias=None: launch_product(a, b, PRECISION="ieee", num_stages=1, maxnreg=64),
    "three_products": lambda a, b, bias=None: launch_product(a, b, PRECISION="tf32x3"),
}.items():
    register(op="gemm", name=f"test_{name}", role="optimized", backend="triton")(call)

@triton.jit
def halve(x, y, n, BLOCK: tl.constexpr):
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) * 0.5, mask=at < n)

@register(op="silu_and_mul", name="test_staged", role="optimized", backend="triton")
def staged(x):
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    halve[(1,)](x, out, out.numel(), 1024, num_stages=4)
    return out

"""
GEMM = Case(M=128, N=256, K=256, layout="NT", bias=False)
SILU = Case(T=64, I=1024)
WANTED = [
    *(("gemm", name, GEMM, "bf16") for name in ("specialized", "ignored", "two_warps")),
    *(("gemm", name, GEMM, "fp32") for name in ("default", "ieee", "three_products")),
    ("silu_and_mul", "staged", SILU, "bf16"),
]


Found = dict[str, list[CompiledInfo] | CompileFailure]


def compiled(folder: Path, text: str, wanted: list[tuple[str, str, Case, str]]) -> Found:
    """The kernels of a file, by name: (op, name without its `test_`, case, scheme) of each that is wanted."""
    file = folder / "mine.py"
    file.write_text(text)
    requests = [KernelCase(op, f"test_{name}", case, SCHEMES[scheme], file) for op, name, case, scheme in wanted]
    return dict(zip([name for _, name, _, _ in wanted], compile_kernels(requests), strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Everything that the tests below look at, compiled once."""
    return compiled(tmp_path_factory.mktemp("kernels"), KERNELS, WANTED)


def only(found: Found, name: str) -> CompiledInfo:
    result = found[name]
    assert not isinstance(result, CompileFailure), result
    (info,) = result
    return info


def told(info: CompiledInfo, scheme: str = "bf16") -> dict[str, tuple[bool, str]]:
    return {option.name: (option.took_effect, option.sentence) for option in options(info, scheme)}


RESULTS = (
    ("specialized", "bf16", "warp specialization", True, "384 threads at num_warps=4, and registers move"),
    ("ignored", "bf16", "warp specialization", False, "256 threads at num_warps=8, no more"),
    ("specialized", "bf16", "wgmma", True, "64 rows in bf16"),
    ("two_warps", "bf16", "wgmma", False, "no wgmma instruction; num_warps=2 is less than a warpgroup's 4"),
    ("specialized", "bf16", "TMA", True, "tt.descriptor_load"),
    ("specialized", "bf16", "pipelining", True, "num_stages=3 was asked for: 4 asynchronous copies (TMA)"),
    ("staged", "bf16", "pipelining", False, "num_stages=4 was asked for, and the code has no asynchronous"),
    ("default", "fp32", "precision fp32", False, "rounded to TF32 by tl.dot's default"),
    ("ieee", "fp32", "precision ieee", True, "no TF32"),
    ("three_products", "fp32", "precision tf32x3", True, "input_precision tf32x3 was asked for"),
)
"""Kernel, scheme, option, whether it took effect, and words of the sentence."""


def test_what_became_of_what_was_asked_for(found):
    for name, scheme, option, effect, words in RESULTS:
        took_effect, sentence = told(only(found, name), scheme)[option]
        assert took_effect is effect and words in sentence, f"{name}: {sentence}"
    ordinary = replace(only(found, "two_warps"), opcodes={"LDG.E.128": 5, "LDGSTS.E.128": 3})
    assert told(ordinary)["TMA"][0] is False and "has none, but 8 ordinary loads" in told(ordinary)["TMA"][1]
    assert "precision fp32" not in told(only(found, "default"), "bf16"), "where fp32 was not meant"
    assert "precision fp32" not in told(only(found, "three_products"), "fp32"), "a split is no rounding"
    assert "asynchronous wgmma" not in told(only(found, "specialized"))
    said = "(C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    effect, sentence = told(replace(only(found, "specialized"), warnings=(said,)))["asynchronous wgmma"]
    assert not effect and said in sentence


def test_specialised_warps_feed_the_hot_loop(found):
    summary = summarize(only(found, "specialized"), "bf16", get_device("h100"))
    assert summary.loop["counts"]["wgmma"] >= 1 and "tma" not in summary.loop["counts"]
    assert summary.loop["fed_by"]["tma"] == 2 and summary.in_loop["tma"] == 2
    plain = summarize(only(found, "ignored"), "bf16", get_device("h100"))
    assert plain.loop["counts"]["tma"] == 2 and not plain.loop["fed_by"], "one loop does both"


def test_dots_are_read_in_all_their_forms():
    ir = """
    %1 = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<128x64xbf16> * tensor<64x32xbf16> -> tensor<128x32xf32>
    %2 = tt.dot %a, %b, %c : tensor<2x16x64xf32, #op> * tensor<2x64x32xf32, #op> -> tensor<2x16x32xf32, #mma>
    %3 = ttng.warp_group_dot %a, %b, %c {inputPrecision = 0 : i32} : !ttg.memdesc<64x16xf16, #s, #smem> * !ttg.memdesc<16x8xf16, #s, #smem> -> tensor<64x8xf32, #mma>
    """  # noqa: E501
    found = dots(ir)
    assert found == [(128, "bf16", "tf32"), (16, "f32", "ieee"), (64, "f16", "tf32")]

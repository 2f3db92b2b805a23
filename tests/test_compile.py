"""Every kernel of our own compiles for Hopper with no GPU, and its compiled code is what its author meant."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflab.bench.compile.cases import COMPILED, Selected, select
from rooflab.bench.compile.static import (
    CompiledInfo,
    CompileFailure,
    Request,
    compile_kernel,
    compile_kernels,
    own_compilers,
)
from rooflab.bench.compile.store import Store
from rooflab.bench.compile.summary import dots, options
from rooflab.kernels.registry import Kernel, get_kernel, kernels, ops
from rooflab.reference.spec import SCHEMES, Case

CASE = Case(M=64, N=64, K=128, layout="NN", bias=False)
BF16, FP32 = SCHEMES["bf16"], SCHEMES["fp32"]
SPILLS = {
    ("sample/bisect", "bf16"): (
        16,
        "values that wait while the cut is sought; two are read again for each of its eight digits",
    ),
    ("flash_attention/ping_pong", "bf16"): (
        16,
        "four values of a causal tile, stored before the loops of the products and read after them",
    ),
    ("paged_attention/tma_pages", "bf16"): (
        48,
        "where a tile begins, and four values of the producer; none in the loops of the products",
    ),
    ("paged_attention/gqa_packed", "fp32"): (
        16,
        "two values that the loop does not need, stored before it and read after it",
    ),
}
"""Kernels that may spill registers, by dtype: how many bytes a thread, and why that is no matter."""

EXTERNAL = """
import torch, triton, triton.language as tl
from rooflab.kernels.registry import register

@triton.jit
def product(a, b, c, K, READ: tl.constexpr):
    i = tl.arange(0, 64)
    acc = tl.zeros((64, 64), tl.float32)
    for k in range(0, K, 64):
        x = tl.load(a + i[:, None] * K + k + i[None])
        acc += tl.dot(x, tl.load(b + (k + i)[:, None] * 64 + i[None]), input_precision="tf32")
    tl.store(c + i[:, None] * 64 + i[None], acc)

def launch(a, b, read=False):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    print("what a launcher prints is not an answer")
    scale = a[0, 0].item() if read else 1
    product[(2, 1)](a, b, c, a.shape[1], READ=scale)
    product[(2, 1)](a, b, c, a.shape[1], READ=scale)
    return c

@register(op="gemm", name="test_product", role="optimized", backend="triton")
def once(a, b, bias=None):
    return launch(a, b)

@register(op="gemm", name="test_reads", role="optimized", backend="triton")
def reads(a, b, bias=None):
    return launch(a, b, True)

@register(op="gemm", name="test_no_launch", role="optimized", backend="triton")
def nothing(a, b, bias=None):
    return a @ b

@register(op="gemm", name="test_dies", role="optimized", backend="triton")
def dies(a, b, bias=None):
    import os, sys
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)

@register(op="gemm", name="test_bad_code", role="optimized", backend="triton")
def bad(a, b, bias=None):
    product[(1,)](a, b, a, a.shape[1], READ=torch.nan, no_such_option=3)
"""


def _kernels() -> Iterator[Kernel]:
    for op in ops():
        yield from (kernel for kernel in kernels(op).values() if kernel.backend in COMPILED and kernel.role != "peer")


@cache
def main_scheme(op: str, name: str) -> str:
    """bf16, or the last scheme of an op that has others: of weight-only products the largest group; the last that the
    kernel takes where it takes not that."""
    spec, kernel = ops()[op], kernels(op)[name]
    usual = ["bf16"] if "bf16" in spec.schemes else []
    for scheme in (*usual, *reversed(spec.schemes)):
        made = (spec.make_inputs(case, SCHEMES[scheme], torch.device("meta"), 0) for case in spec.cases["smoke"])
        if any(kernel.why_not_args(inputs) is None for inputs in made):
            return scheme
    return (*usual, *reversed(spec.schemes))[0]


@cache
def compiled() -> dict[Request, list[CompiledInfo] | CompileFailure]:
    """Everything that the tests below look at, compiled once, on all cores: the most work of llama3_8b in the main
    scheme, the least too where the launcher takes another config for it, and of kernels with a product the most in
    fp32."""
    schemes = dict.fromkeys(("bf16", "fp32", *(main_scheme(kernel.op, kernel.name) for kernel in _kernels())))
    every = select(None, (), ("llama3_8b",), (), tuple(schemes), every_case=True)
    most = {(item.kernel.id, item.scheme.name): item for item in every}
    least = {(item.kernel.id, item.scheme.name): item for item in reversed(every)}
    main = {key for key in most if key[1] == main_scheme(*key[0].split("/"))}
    narrow = [most[key] for key in main]
    narrow += [least[key] for key in main if _config(least[key]) != _config(most[key])]
    found = _compile(narrow)
    products = {
        request[:2] for request, result in found.items() if isinstance(result, list) and any(dots(i.ir) for i in result)
    }
    wide = [item for key, item in most.items() if key[1] == "fp32" and item.key[:2] in products]
    return found | _compile(wide)


def _config(item: Selected) -> Any:
    return item.kernel.tuning.heuristic(item.case, item.scheme) if item.kernel.tuning else None


def _compile(items: list[Selected]) -> dict[Request, list[CompiledInfo] | CompileFailure]:
    requests = [Request(item.kernel.op, item.kernel.name, item.case, item.scheme) for item in items]
    return dict(zip(requests, compile_kernels(requests, Store()), strict=True))


def _of(kernel: Kernel, scheme: str) -> dict[Case, list[CompiledInfo]]:
    found = {
        request.case: result
        for request, result in compiled().items()
        if (request.op, request.kernel, request.scheme.name) == (kernel.op, kernel.name, scheme)
    }
    failures = [str(result) for result in found.values() if isinstance(result, CompileFailure)]
    assert not failures, "\n".join(failures)
    return {case: result for case, result in found.items() if not isinstance(result, CompileFailure)}


every_kernel = pytest.mark.parametrize("kernel", [pytest.param(kernel, id=kernel.id) for kernel in _kernels()])


@every_kernel
def test_compiles_for_hopper(kernel):
    found = _of(kernel, main_scheme(kernel.op, kernel.name))
    assert found, f"{kernel.id} takes no case of llama3_8b in {main_scheme(kernel.op, kernel.name)}"
    for case, launches in found.items():
        for info in launches:
            assert info.target == "sm_90a" and 0 < info.registers <= 255 and info.threads >= 32 * info.num_warps
            assert info.shared_bytes <= 232448, f"{info.name} at {case.id}: more shared memory than a block can have"
            assert all(size > 0 for size in info.grid), f"{info.name} at {case.id}: an empty grid {info.grid}"


@pytest.mark.parametrize("scheme", ["main", "fp32"])
@every_kernel
def test_spills_no_registers(kernel, scheme):
    scheme = main_scheme(kernel.op, kernel.name) if scheme == "main" else scheme
    allowed, _ = SPILLS.get((kernel.id, scheme), (0, ""))
    launches = [(case, info) for case, found in _of(kernel, scheme).items() for info in found]
    for case, info in launches:
        spills = f"{info.name} at {case.id}: {info.spill_loads} LDL, {info.spill_stores} STL, {info.stack_bytes} bytes"
        assert info.stack_bytes <= allowed, spills
        assert allowed or info.spill_loads == info.spill_stores == 0, spills
    assert not allowed or any(info.stack_bytes for _, info in launches), f"{kernel.id} spills no longer; drop its entry"


@every_kernel
def test_fp32_is_fp32(kernel):
    """`tl.dot` rounds fp32 operands to TF32 unless told otherwise, which the interpreter does not show.  A kernel
    without a product has nothing to round."""
    for case, launches in _of(kernel, "fp32").items():
        for info in launches:
            assert not info.uses_tf32, f"{info.name} at {case.id}: TF32 in fp32"


@every_kernel
def test_every_option_takes_effect(kernel):
    for scheme in (main_scheme(kernel.op, kernel.name), "fp32"):
        for case, launches in _of(kernel, scheme).items():
            failed = [o.sentence for info in launches for o in options(info, scheme) if not o.took_effect]
            assert not failed, f"{kernel.id} at {case.id} in {scheme}: {failed}"


def test_the_kernels_with_products_are_seen():
    assert {"gemm", "flash_attention", "paged_attention"} <= {r.op for r in compiled() if r.scheme.name == "fp32"}


def test_gemm_uses_hoppers_tensor_cores():
    kernel = get_kernel("gemm", "tensor_core")
    largest = max(_of(kernel, "bf16"), key=lambda case: case["M"])
    (info,) = _of(kernel, "bf16")[largest]
    assert info.uses_wgmma and info.count("HGMMA") >= 1 and "wgmma.mma_async" in info.ptx
    assert not info.uses_warp_specialization
    for launches in _of(kernel, "bf16").values():
        assert all(info.uses_tensor_cores for info in launches)


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("kernels") / "mine.py"
    file.write_text(EXTERNAL)
    return file


def test_a_kernel_from_a_file(external):
    (info,) = compile_kernel("gemm", "test_product", CASE, FP32, file=external)
    assert (info.name, info.grid, info.launches, info.num_warps, info.threads) == ("product", (2, 1), 2, 4, 128)
    assert info.uses_tf32 and info.uses_wgmma and not info.uses_tma and info.shared_bytes > 0
    assert info.sass.count("HGMMA") == info.count("HGMMA") and "tf32" in info.ptx


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_reads", "meta tensors"),
        ("test_no_launch", "gemm/test_no_launch launched none"),
        ("test_bad_code", "no_such_option"),
        ("test_dies", r"status 7: (?s:.*)last words"),
    ],
)
def test_what_goes_wrong_is_said(external, name, words):
    with pytest.raises(CompileFailure, match=words):
        compile_kernel("gemm", name, CASE, FP32, file=external)
    assert compile_kernel("gemm", "test_product", CASE, FP32, file=external), "the next compile has a worker"


def test_only_kernels_with_code_compile():
    with pytest.raises(ValueError, match="gemm/library, whose backend is torch"):
        compile_kernel("gemm", "library", CASE, BF16)


def test_a_compile_that_does_not_end_is_ended(external, monkeypatch):
    monkeypatch.setattr(own_compilers(), "limit_s", 0.0)
    with pytest.raises(CompileFailure, match="took longer than 0 s, and was ended"):
        compile_kernel("gemm", "test_product", CASE, FP32, file=external)


def test_opcodes_are_counted_by_family():
    opcodes = {
        "LDL.64": 2,
        "STL": 1,
        "HGMMA.64x128x16.F32.BF16": 3,
        "HMMA.16816.F32": 1,
        "HFMA2.MMA": 9,
        "UTMALDG.2D": 1,
        "USETMAXREG.DEALLOC.CTAPOOL": 1,
    }
    info = CompiledInfo("k", "sm_90a", (1,), 1, 4, 3, 384, 168, 8, 0, opcodes, "", "")
    assert (info.spill_loads, info.spill_stores, info.count("HGMMA", "HMMA")) == (2, 1, 4)
    assert info.uses_wgmma and info.uses_tensor_cores and info.uses_tma and info.uses_warp_specialization
    assert not info.uses_tf32

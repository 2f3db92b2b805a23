"""Tests that each of our kernels compiles for Hopper without a GPU, that its code is what its author meant, and that
the code of a rung differs from the rung below in the respect that its op's ladder claims.

A rung with code of our own is compiled for the largest case of llama3_8b.  If the rung, or the rung below, consists of
torch calls, those are compared: on a GPU every call that is no view is at least one launch.  The claims stand in the
registrations (`shown.py`).  All compilations of an op are asserted in one test, so that one process makes them once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from compiled import compile_kernel
from packaging.version import Version
from shown import not_shown, usual_scheme

from rooflab.bench.compile.cases import KernelCase, Query, has_code
from rooflab.bench.compile.static import CompiledInfo, CompileFailure, compile_kernels, own_compilers
from rooflab.bench.compile.store import Store
from rooflab.bench.compile.summary import options
from rooflab.kernels.registry import Kernel, get_kernel, kernels, ops
from rooflab.reference.spec import SCHEMES, Case

CASE = Case(M=64, N=64, K=128, layout="NN", bias=False)
BF16, FP32 = SCHEMES["bf16"], SCHEMES["fp32"]
SPILLS = {
    # Values that wait while the cut is sought; two are read again for each of its eight digits.
    ("sample/bisect", "bf16"): 16,
    # Four values of a causal tile, stored before the loops of the products and read after them.
    ("flash_attention/ping_pong", "bf16"): 16,
    # Of a consumer, where a tile begins; none in the loops of the products, and none of the producer's loops.
    ("paged_attention/tma_pages", "bf16"): 56,
    # Two values that the loop does not need, stored before it and read after it.
    ("paged_attention/gqa_packed", "fp32"): 16,
    # A pointer, stored before the loops and read after them.
    ("gemm/gemv", "fp32"): 8,
}
"""Kernels that may spill registers, by dtype: how many bytes a thread."""
if Version(triton.__version__) < Version("3.7"):
    for _name, _scheme in (("sample/bisect", "bf16"), ("paged_attention/gqa_packed", "fp32")):
        del SPILLS[_name, _scheme]
    SPILLS |= {("flash_attention/ping_pong", "bf16"): 48, ("paged_attention/tma_pages", "bf16"): 64}

IN_FP32 = (("gemm/pipelined", "fp32"), ("paged_attention/gqa_packed", "fp32"))
"""Kernels that the short suite compiles in fp32 as well: of one a claim speaks, the other may spill."""
NOT_COMPARED = {
    "gemm/native": "it calls nothing of torch, as library does not; `test_native.py` shows its panels",
    "gemm_w8a16/native": "as gemm/native",
    "gemm_w8a16/packed": "`test_gemm_w8a16.py` shows its calls, on a CPU with instructions for bf16",
    "gemm/packed": "the weight's layout is oneDNN's own, which nothing shows; `rooflab bench gemm` shows what it saves",
}
"""Rungs whose difference neither code nor calls show, and why."""

EXTERNAL = """
import torch, triton, triton.language as tl
from rooflab.kernels.registry import register

@triton.jit
def copy(x, y, READ: tl.constexpr):
    tl.store(y + tl.arange(0, 64), tl.load(x + tl.arange(0, 64)))

def launch(a, b, read=False):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    print("what a launcher prints is not an answer")
    copy[(2, 1)](a, c, READ=a[0, 0].item() if read else 1)
    return c

def dies():
    import os, sys
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)

for name, call in {
    "copies": lambda a, b, bias=None: launch(a, b),
    "reads": lambda a, b, bias=None: launch(a, b, True),
    "no_launch": lambda a, b, bias=None: a @ b,
    "dies": lambda a, b, bias=None: dies(),
    "bad_code": lambda a, b, bias=None: copy[(1,)](a, b, READ=1, no_such_option=3),
}.items():
    register(op="gemm", name=f"test_{name}", role="optimized", backend="triton")(call)
"""


def _kernels() -> Iterator[Kernel]:
    for op in ops():
        yield from filter(has_code, kernels(op).values())


Compiled = dict[KernelCase, list[CompiledInfo] | CompileFailure]


def compile_for_hopper(op: str) -> Compiled:
    """Every kernel of an op at the most work of llama3_8b in its main scheme, and two in fp32."""
    schemes = dict.fromkeys(("bf16", "fp32", *(usual_scheme(kernel.op, kernel.name) for kernel in _kernels())))
    every = Query(op, (), ("llama3_8b",), (), tuple(schemes), every_case=True).select()
    most = {(item.registered.id, item.scheme.name): item for item in every}
    wanted = [key for key in most if key[1] == usual_scheme(*key[0].split("/")) or key in IN_FP32]
    items = [most[key] for key in wanted]
    return dict(zip(items, compile_kernels(items, Store()), strict=True))


def faults_of(request: KernelCase, info: CompiledInfo) -> Iterator[str]:
    """What is wrong with one compiled kernel, spills left out."""
    if info.target != "sm_90a" or not 0 < info.registers <= 255 or info.threads < 32 * info.num_warps:
        yield f"{info.target}, {info.registers} registers, {info.threads} threads"
    if info.shared_bytes > 232448:
        yield f"{info.shared_bytes} bytes of shared memory, more than a block can have"
    if not all(size > 0 for size in info.grid):
        yield f"an empty grid {info.grid}"
    # `tl.dot` rounds fp32 operands to TF32 unless told otherwise, which the interpreter does not show; its default
    # stands in Triton's IR whatever the operands.
    if (request.scheme.name == "fp32" and info.uses_tf32) or (
        "inputPrecision = tf32" in info.ir and usual_scheme(request.op, request.kernel, "fp32") == "fp32"
    ):
        yield "TF32 in fp32"
    yield from (option.sentence for option in options(info, request.scheme.name) if not option.took_effect)


def check_code(compiled: Compiled) -> None:
    """Asserts that everything compiled, and as its author meant."""
    faults = []
    for request, result in compiled.items():
        name = f"{request.op}/{request.kernel} at {request.case.id} in {request.scheme.name}"
        if isinstance(result, CompileFailure):
            faults.append(f"{name}: {result}")
            continue
        allowed = SPILLS.get((f"{request.op}/{request.kernel}", request.scheme.name), 0)
        for info in result:
            faults += [f"{name}: {info.name}: {fault}" for fault in faults_of(request, info)]
            if info.stack_bytes > allowed or (not allowed and info.spill_loads + info.spill_stores):
                faults.append(f"{name}: {info.name}: {info.stack_bytes} bytes of spilled registers")
    assert not faults, "\n".join(faults)


def check_claims(rungs: Iterable[Kernel], together: bool = True) -> None:
    """Asserts what these rungs show, all of it before it says what does not hold."""
    wrong = [text for kernel in rungs for text in not_shown(kernel, together)]
    assert not wrong, "\n".join(wrong)


def test_one_rung_differs_as_its_ladder_claims():
    """Of the rung that ROOFLAB_RUNG names, alone."""
    kernel = get_kernel(*os.environ.get("ROOFLAB_RUNG", "softmax/fused").split("/"))
    check_claims([kernel])
    check_claims([kernel], together=False)


def test_what_a_rung_s_code_does_not_show_is_said():
    kernel = replace(get_kernel("softmax", "fused"), shows={"": "global_load == 2; global_load == 3; len(loops) > 0"})
    wrong = ["softmax/fused : global_load == 3", "softmax/fused : len(loops) > 0"]
    assert list(not_shown(kernel, together=True)) == wrong and not list(not_shown(kernel, together=False))
    with pytest.raises(AttributeError, match="no_such_number"):
        list(not_shown(replace(kernel, shows={"": "no_such_number == 0"}), together=True))


@pytest.mark.sampled(0, 5)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", dict.fromkeys(kernel.op for kernel in _kernels()))
def test_every_kernel_compiles_for_hopper_and_rungs_differ_as_their_ladders_claim(op):
    compiled = compile_for_hopper(op)
    check_code(compiled)
    taken = {f"{request.op}/{request.kernel}" for request in compiled}
    assert taken == {kernel.id for kernel in _kernels() if kernel.op == op}, "each takes a case of llama3_8b"
    codes = {(f"{request.op}/{request.kernel}", request.scheme.name): found for request, found in compiled.items()}
    unspilled = [key for key in SPILLS if key in codes and not any(info.stack_bytes for info in codes[key])]
    assert not unspilled, "these spill no longer; drop their entries, which would hide a new spill"
    check_claims(kernels(op).values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rungs_that_are_compiled_several_times_differ_as_their_ladders_claim():
    check_claims((kernel for op in ops() for kernel in kernels(op).values()), together=False)


def test_every_rung_has_a_claim():
    rungs = [kernel for op in ops() for kernel in kernels(op).values() if kernel.role == "optimized"]
    silent = {kernel.id for kernel in rungs if not kernel.shows}
    assert silent == {*NOT_COMPARED}, "`shows` says in which respect a rung's code differs from the rung below"
    assert all(kernel.over in kernels(kernel.op) for kernel in rungs if kernel.shows)


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("kernels") / "mine.py"
    file.write_text(EXTERNAL)
    return file


@pytest.mark.more
def test_what_goes_wrong_is_said(external):
    for name, words in (
        ("test_reads", "meta tensors"),
        ("test_no_launch", "gemm/test_no_launch launched none"),
        ("test_bad_code", "no_such_option"),
        ("test_dies", r"status 7: (?s:.*)last words"),
    ):
        with pytest.raises(CompileFailure, match=words):
            compile_kernel("gemm", name, CASE, FP32, file=external)
    assert compile_kernel("gemm", "test_copies", CASE, FP32, file=external), "the next compile has a worker"


def test_a_compile_that_does_not_end_is_ended(external, monkeypatch):
    monkeypatch.setattr(own_compilers(), "limit_s", 0.0)
    with pytest.raises(CompileFailure, match="took longer than 0 s, and was ended"):
        compile_kernel("gemm", "test_copies", CASE, FP32, file=external)


def test_what_opcodes_say_of_a_kernel():
    opcodes = {"LDL.64": 2, "STL": 1, "HGMMA.64x128x16.F32.BF16": 3, "HMMA.16816.F32": 1, "HFMA2.MMA": 9}
    opcodes |= {"UTMALDG.2D": 1, "USETMAXREG.DEALLOC.CTAPOOL": 1}
    info = CompiledInfo("k", "sm_90a", (1,), 1, 4, 3, 384, 168, 8, 0, opcodes, "", "")
    assert (info.spill_loads, info.spill_stores, info.count("HGMMA", "HMMA")) == (2, 1, 4)
    assert info.counts["wgmma"] and info.counts["tma"] and info.uses_warp_specialization
    assert not info.uses_tf32

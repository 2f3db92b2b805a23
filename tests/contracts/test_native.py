"""C++ kernels for the CPU: built once for this processor and torch's threads, or refused in one sentence."""

import re

import pytest
import torch
from op_kernels import own_registry  # noqa: F401

from rooflab.bench.core.check import check_kernel
from rooflab.kernels import _native
from rooflab.kernels._native import built
from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import get_scheme

pytestmark = pytest.mark.needs("C++ compiler")
SOURCE = '#include "_native.h"\nextern "C" int run(int a, i64 b, float c) { return a + b + (c > 0.5f); }\n'


def test_a_source_is_built_once_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "adds.cpp"

    def build(text):
        source.write_text(text)
        built.cache_clear()
        return built(source, "inf"), {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/native").iterdir()}

    run, first = build(SOURCE)
    assert run(3, 2**31 - 9, 0.75) == 2**31 - 5 and len(first) == 1
    run, again = build(SOURCE)
    assert run(1, 1, 0.0) == 2 and again == first, "built again"
    run, changed = build(SOURCE.replace("a + b", "a - b"))
    assert run(1, 1, 0.0) == 0 and len(changed) == 2 and first.items() <= changed.items()
    with pytest.raises(ValueError, match=r"/adds: the compiler failed: .*error"):
        build("no C++\n")
    built.cache_clear()


def test_a_compiler_that_is_too_old_serves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path))
    old = tmp_path / "old-g++"
    old.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 9.4 && exit 0\necho "_native.h:15: error: no _Float16" >&2; exit 1\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    _native.compiler.cache_clear()
    refusal = get_kernel("gemm", "native").why_not_here(torch.device("cpu"))
    assert str(refusal) == f"UNSUPPORTED: needs GCC 12 or Clang 15; {old} says: _native.h:15: error: no _Float16"
    _native.compiler.cache_clear()


def test_its_loops_run_on_the_threads_of_torch():
    get_kernel("silu_and_mul", "native").fn(torch.ones(2, 8))
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if re.search(r"/lib[gi]?omp[^/]*$", line)}
    assert len(runtimes) == 1, "two OpenMP runtimes fight for the cores"


def test_nothing_is_written_before_positions_and_slots_are_checked():
    rope = get_kernel("rope_and_cache", "native").fn
    q, k, cache, table = torch.ones(2, 2, 4), torch.ones(2, 1, 4), torch.zeros(2, 3, 1, 4), torch.ones(5, 2)
    for positions, slots, message in (
        ([0, 5], [0, 1], "positions: expected at most 4"),
        ([0, 1], [0, 6], "slot_mapping: expected at most 5"),
    ):
        with pytest.raises(ValueError, match=message):
            rope(q, k, k, table, table, torch.tensor(positions), q.clone(), cache, cache, torch.tensor(slots))
    assert not cache.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype, threads):
    generator = torch.Generator().manual_seed(0)
    a, weight, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 1100), (70, 1100), (300, 128)))
    panels, found = get_kernel("gemm", "native").prepare(weight.mT), []
    for count in (1, 2, 3):
        threads(count)
        found.append((get_kernel("gemm", "native").fn(a, panels), get_kernel("silu_and_mul", "native").fn(x)))
    assert all(torch.equal(one, other) for pair in found[1:] for one, other in zip(found[0], pair, strict=True))


@pytest.mark.usefixtures("own_registry")
def test_what_is_bound_for_a_layout_is_bound_again_for_other_threads(threads):
    def mine(x, out, *, bound):
        out.fill_(bound)

    kernel(op="softmax", backend="cpp", devices=("cpu",), bind=lambda of: torch.get_num_threads())(mine)
    found = []
    for count in (1, 3, 1):
        threads(count)
        found.append(int(get_kernel("softmax", "mine").fn(torch.ones(1, 1))))
    assert found == [1, 3, 1]


INSTRUCTIONS = {"no VNNI": ("-DWITHOUT_VNNI",), "AVX2": ("-march=x86-64-v3",), "plain": ("-march=x86-64",)}
"""`test_kernels.py` has this processor's own.  A build takes 4 s, and is kept as any other."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", INSTRUCTIONS.values(), ids=INSTRUCTIONS)
@pytest.mark.parametrize("op", ("gemm_gguf", "gemm_w8a16"))
def test_each_set_of_instructions_gives_a_product_within_the_tolerance(monkeypatch, op, options):
    if options == INSTRUCTIONS["AVX2"] and "avx2" not in _native.processor().split():
        options = INSTRUCTIONS["plain"]
    monkeypatch.setattr(_native, "COMPILER_OPTIONS", (*_native.COMPILER_OPTIONS, *options))
    built.cache_clear()
    try:
        spec, kernel = get_op(op), get_kernel(op, "native")
        for case in (*spec.cases["smoke"], *spec.cases["edge"][:4]):
            for scheme in spec.schemes:
                result = check_kernel(kernel, spec, case, get_scheme(scheme), planted=False)
                assert result.status == "OK", f"{case.id} {scheme}: {result.reason}"
    finally:
        built.cache_clear()

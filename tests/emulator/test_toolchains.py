"""`rooflab emulate --triton`: the same kernel with several versions of Triton, and which of them is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from rooflab.bench.emulate import toolchains
from rooflab.bench.emulate.toolchains import KernelByVersion, Row

HEAD = "import os, torch, triton, triton.language as tl\n"
SHIFTED = """
SHIFT = tl.constexpr(int(os.environ.get("PLANTED", "0")))

@triton.jit
def _copy(x_ptr, out_ptr):
    tl.store(out_ptr + tl.arange(0, 64), tl.load(x_ptr + (tl.arange(0, 64) + SHIFT) % 64))

def copy_into(x, out):
    _copy[(1,)](x, out)
"""
JOINED = """
@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    codes = tl.load(b_ptr + columns[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :])
    joined = tl.join((codes & 15).to(tl.int16), (codes >> 4).to(tl.int16)).reshape(N, K)
    a = tl.load(a_ptr + rows[:, None] * K + tl.arange(0, K)[None, :])
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], tl.dot(a, joined.to(tl.bfloat16).T))

def codes_of(x):
    return (x.float() * 4 + 8).round().clamp(0, 15)

def run(a, b):
    codes = codes_of(b).to(torch.uint8)
    out = torch.empty(len(a), len(b), device=a.device)
    _dot[(1,)](a, (codes[:, ::2] | codes[:, 1::2] << 4).contiguous(), out, len(a), len(b), a.shape[1])
    return out

def oracle(a, b):
    return a @ codes_of(b).double().T
"""
UNALIGNED = """
@triton.jit
def _rows(x_ptr, out_ptr):
    rows, columns = tl.arange(0, 32), tl.arange(0, 16)
    group = rows % (2 << (rows // 16))
    tl.store(out_ptr + rows[:, None] * 16 + columns[None, :], tl.load(x_ptr + group[:, None] + columns[None, :]))

def run(x):
    out = torch.empty(32, 16, device=x.device)
    _rows[(1,)](x, out)
    return out

def oracle(x):
    rows = torch.arange(32)
    return x[(rows % (2 << (rows // 16)))[:, None] + torch.arange(16)]
"""
FIRST = Row("1.0", "OK", "", reference="right", registers=40, spills=0, wgmma=4, barriers=9, fences=2)


def test_a_version_is_judged_by_the_reference_or_else_by_the_first_one():
    x = torch.tensor([1.0, 2.0, float("nan")])
    rows = [replace(FIRST, triton=f"1.{number}") for number in range(6)]
    rows[2] = replace(rows[2], status="INCORRECT", reference="wrong")
    rows[3] = replace(rows[3], reference=None)
    rows[4] = replace(rows[4], findings=("race",), spills=8, registers=32)
    values: list[Any] = [[x], [x * (1 + 2**-23)], [x + 1], [x + 1], [x], None]
    found = KernelByVersion("k", toolchains.compared(rows, values))
    assert [row.values for row in found.rows] == [
        None, toolchains.ROUNDED, toolchains.OTHER, toolchains.OTHER, toolchains.SAME, None
    ]  # fmt: skip
    assert [row.bad for row in found.rows] == [
        (),
        (),
        ("its values are not those of the reference",),
        ("its values are not those of 1.0",),
        ("it has 1 finding, and 1.0 0", "it spills 8 bytes a thread, and 1.0 0"),
        (),
    ]
    assert found.first_other == {
        "status": "1.2", "reference": "1.2", "values": "1.2", "findings": "1.4", "registers": "1.4", "spills": "1.4"
    }  # fmt: skip
    assert found.is_worse and not replace(found, rows=found.rows[:2]).is_worse
    mended = toolchains.compared([replace(FIRST, reference="wrong"), rows[1]], [[x + 1], [x]])
    assert mended[0].bad and mended[1].values == toolchains.OTHER and not mended[1].bad, "the later one is right"


@pytest.mark.parametrize("text", ["3.6.0", "3.6.0,3.6.0", "3.6.0,newest", "3.6.0,../3.7.1", ","])
def test_versions_are_at_least_two_each_once(text):
    with pytest.raises(ValueError, match="triton: expected two or more versions, each once, as 3.6.0,3.9.0, got"):
        toolchains.versions_of(text)


def test_a_version_that_pip_cannot_bring_is_named(monkeypatch, tmp_path):
    for name, value in {"ROOFLAB_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"triton: expected versions that pip can install, got 99.0.1: .*99\.0\.1"):
        toolchains.folder_of("99.0.1")
    assert not list((tmp_path / "triton").iterdir()) and toolchains.folder_of(triton.__version__) is None


@pytest.mark.more
def test_a_version_that_computes_something_else_is_named(rooflab, monkeypatch, tmp_path):
    """A folder that only sets a variable stands for another version.  Processes of both versions take 15 s to start."""
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    planted = tmp_path / "cache/triton/99.0.1"
    planted.mkdir(parents=True)
    (planted / "sitecustomize.py").write_text("import os\nos.environ['PLANTED'] = '1'\n")
    (tmp_path / "mine.py").write_text(HEAD + SHIFTED)
    words = ("emulate", "mine.py::copy_into", "--shape", "x=64,out=64", "--triton", f"{triton.__version__},99.0.1")
    status, out, _ = rooflab(*words, "--json")
    (found,) = json.loads(out)
    first, second = found["rows"]
    assert status == 10 and first["status"] == second["status"] == "OK" and first["registers"] > 0
    assert first["bad"] == [] and second["bad"] == [f"its values are not those of {triton.__version__}"]
    assert found["first_other"]["values"] == "99.0.1"
    status, _, err = rooflab(*words, "--ctas", "3")
    assert status == 2 and "--ctas: expected no --triton with it, got 3" in err


@pytest.mark.slow
@pytest.mark.needs("Triton 3.8.0", "Triton 3.9.0")
@pytest.mark.parametrize(
    ("text", "shape", "fault"),
    [
        (JOINED, "a=32x16:bf16,b=64x16:bf16", "its values are not those of the reference"),  # triton-lang/triton#11691
        (UNALIGNED, "x=64", "it has 1 finding, and 3.9.0 0"),  # triton-lang/triton#11544
    ],
)
def test_known_miscompilations_are_found(text, shape, fault, rooflab, tmp_path):
    (tmp_path / "mine.py").write_text(HEAD + text)
    words = ("emulate", "mine.py::run", "--reference", "mine.py::oracle", "--shape", shape)
    status, out, _ = rooflab(*words, "--triton", "3.9.0,3.8.0")
    assert status == 10 and f"3.8.0: {fault}" in out and "\n3.9.0: " not in out


@pytest.mark.sampled(0, 1)
@pytest.mark.needs("Triton 3.6.0")
@pytest.mark.parametrize("kernel", ["flash_attention ping_pong", "paged_attention tma_pages"])
def test_the_oldest_triton_compiles_what_passes_tensors_for_their_layouts(kernel, rooflab):
    """A layout that is no constexpr of its own is no argument of a function there."""
    status, out, _ = rooflab("emulate", *kernel.split(), "--triton", f"3.6.0,{triton.__version__}")
    assert status == 0 and "COMPILE_ERROR" not in out

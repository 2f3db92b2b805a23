"""What kernels print, and the names of C++ kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooflab.bench.base.ptxas import errors_of
from rooflab.bench.compile.demangle import demangled
from rooflab.bench.emulate.ours import compile_ptx
from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.execute import printing
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.machine.run import Checks, EmulationError

SOURCE = r"""
extern "C" __device__ int printf(const char*, ...);

extern "C" __global__ void prints(const float* x, long long n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x % 16 == 3)
        printf("%5.2f|%-4d|%#x|%lld|%c%%|%*d|%s\n", x[i], -i, 255u, n, 'a' + i % 2, 4, i, i < 32 ? "low" : "high");
    if (i == 0) printf("two\nlines %e %hhu %p", 1.0, 257, (void*)16);
}
extern "C" __global__ void fails(const float* x, long long n) {
    printf("before\n");
    if (threadIdx.x == 7) __trap();
}
"""
TRITON = """
import torch, triton, triton.language as tl

@triton.jit(debug=True)
def _checked(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.device_print("value", x)
    tl.device_assert(x > -100, "x must be above -100")
    tl.store(out_ptr + at, x)

def checked(x):
    out = torch.empty_like(x)
    _checked[(1,)](x, out, BLOCK=64, num_warps=1)
    return out

@triton.jit
def _wrong(x_ptr):
    tl.inline_asm_elementwise("nonsense.u32 $0, $1;", "=r,r", [tl.load(x_ptr)], dtype=tl.int32, is_pure=False, pack=1)

def wrong(x):
    _wrong[(1,)](x)
"""


def printed(name: str, *, fails: bool = False) -> list[str]:
    """The lines that a kernel of `SOURCE` prints in two CTAs of 32 threads."""
    lines: list[str] = []
    x = torch.arange(64) / 4
    launch = PtxLaunch(compile_ptx(SOURCE), name, (32, 1, 1))
    try:
        emulate(launch, (2,), [x, 1 << 40], checks=Checks(), printed=lines)
    except EmulationError as error:
        assert fails and "CTA 0, thread 7: the kernel trapped" in str(error)
    return lines


def test_each_thread_prints_a_line_as_c_formats_it() -> None:
    assert printed("prints") == [
        "prints, CTA 0, thread 3:  0.75|-3  |0xff|1099511627776|b%|   3|low",
        "prints, CTA 0, thread 19:  4.75|-19 |0xff|1099511627776|b%|  19|low",
        "prints, CTA 1, thread 3:  8.75|-35 |0xff|1099511627776|b%|  35|high",
        "prints, CTA 1, thread 19: 12.75|-51 |0xff|1099511627776|b%|  51|high",
        "prints, CTA 0, thread 0: two",
        "prints, CTA 0, thread 0: lines 1.000000e+00 1 0x10",
    ]


def test_lines_stay_if_the_kernel_fails_and_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(printed("fails", fails=True)) == 64
    monkeypatch.setattr(printing, "MAX_LINES", 4)
    assert printed("prints")[3:] == [
        "prints, CTA 1, thread 19: 12.75|-51 |0xff|1099511627776|b%|  51|high",
        "prints: lines beyond the first 4 are not kept",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("checked --shape x=64", 0, "printed: _checked, CTA 0, thread 1: pid (0, 0, 0) idx ( 1) value: "),
        ("checked --shape x=64", 0, "thread 31: pid (0, 0, 0) idx (63) value:"),
        ("checked --shape x=128", 0, "OK: "),
        (
            "checked --shape x=64:int32:range=-100..-100",
            11,
            "thread 0: the assertion 'x must be above -100' failed (mine",
        ),
        ("checked --shape x=64:int32:range=-100..-100", 11, "printed: _checked, CTA 0, thread 0: pid (0, 0, 0)"),
        ("wrong --shape x=1:int32", 11, "COMPILE_ERROR: ptxas refuses the code:\nptxas: line "),
    ],
)
def test_the_command_shows_prints_assertions_and_errors_of_ptxas(
    rooflab: Any, tmp_path: Path, arguments: str, status: int, words: str
) -> None:
    (tmp_path / "mine.py").write_text(TRITON)
    got, out, err = rooflab("emulate", *f"{tmp_path}/mine.py::{arguments}".split())
    assert got == status and words in out, out + err


def test_errors_of_ptxas_stand_on_lines_of_their_own() -> None:
    log = "ptxas /tmp/a.ptx, line 34; error   : Not a name: 'x'\nptxas fatal   : Ptx assembly aborted\nRepro: ptxas -v"
    assert errors_of(log) == "ptxas: line 34 of the PTX: Not a name: 'x'\nptxas: Ptx assembly aborted"
    assert errors_of("ptxas-blackwell a.ptx, line 3; error   : No\n") == "ptxas: line 3 of the PTX: No"
    assert errors_of("ptxas: killed\n") == "ptxas: killed"


def test_a_mangled_name_is_shown_as_it_stands_in_the_source() -> None:
    text = demangled("_Z4copyIfEvPKfPf: kernel.cu:4, _ZN2ab12_GLOBAL__N_14tileEPf and _Zx, a_Z4copyv")
    assert text == "copy<float>: kernel.cu:4, ab::(anonymous namespace)::tile and _Zx, a_Z4copyv"

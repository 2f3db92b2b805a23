"""`rooflab profile --sanitizer`: findings read and counted, and no run that was cut short passes for a clean one."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from fake_tools import command_line, fake_tools

from rooflab.bench.predict import launch_once as _launch_once
from rooflab.bench.predict import ncu, sanitizer

COMMAND = ("profile", "rmsnorm", "library", "--case", "T=16,H=4096,eps=1e-05", "--gpu", "h100")


@pytest.fixture
def rooflab(monkeypatch, capfd, tmp_path):
    """Runs a command in an empty folder and gives its exit status, output and errors."""
    return command_line(monkeypatch, capfd, tmp_path)


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Puts a program of a name on the PATH, which then holds nothing else."""
    return fake_tools(monkeypatch, tmp_path)


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _gemm+0x1a0 in tensor_core.py:96
=========     by thread (3,0,0) in block (4,0,0)
=========     Access to 0x7f7a4e000000 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f7a4d000000 of size 16777216 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x2d0a3a] in libcuda.so.1
=========
========= Invalid __shared__ read of size 2 bytes
=========     at 0x2d0 in second(float *)
=========     by thread (0,1,0) in block (0,0,2)
========= ERROR SUMMARY: 257 errors
========= ERROR SUMMARY: 157 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sum_kernel(int *, int *)+0x90 in block_error.cu:41
=========     and Read access at sum_kernel(int *, int *)+0x100 in block_error.cu:51 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at _rmsnorm+0x70 in fused.py:41
=========     by thread (31,0,0) in block (1,0,0)
========= ERROR SUMMARY: 1 error
"""
SYNCCHECK = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at producer+0x15520
=========     by thread (128,0,0) in block (0,0,0)
========= ERROR SUMMARY: 2 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\n{}\n========= ERROR SUMMARY: 0 errors\n"
NO_RACE = "========= COMPUTE-SANITIZER\n{}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    "tool, text, count, what, kernel, where",
    [
        ("memcheck", MEMCHECK, 257, "Invalid __global__ write of size 4 bytes", "_gemm", (3, 4)),
        ("racecheck", RACECHECK, 1, "Error: Race reported between Write", "sum_kernel", None),
        ("initcheck", INITCHECK, 1, "Uninitialized __global__ memory read of size 4 bytes", "_rmsnorm", (31, 1)),
        ("synccheck", SYNCCHECK, 2, "Barrier error detected. Divergent thread(s) in block.", "producer", (128, 0)),
    ],
)
def test_findings_of_the_sanitizer(tool, text, count, what, kernel, where):
    report = sanitizer.read(text, tool, sanitizer.FOUND_STATUS)
    assert report.count == count and not report.clean
    first = report.findings[0]
    assert (first.what, first.kernel) == (what, kernel)
    assert first.where == (f"thread ({where[0]},0,0), block ({where[1]},0,0)" if where else "")
    assert "Summary" not in first.text and len(first.text.splitlines()) >= 2
    assert tool != "memcheck" or report.findings[1].kernel == "second"


@pytest.mark.parametrize(
    "text, status, message",
    [
        ("", 0, "memcheck did not come to its end (status 0): it printed nothing"),
        ("========= ERROR SUMMARY: 0 errors", 0, "did not come to its end"),  # the call never ran
        (f"{_launch_once.MARK}\n", 0, "did not come to its end"),  # the tool died before its summary
        (CLEAN.format(_launch_once.MARK), 1, "did not come to its end (status 1)"),
        (
            CLEAN.format(_launch_once.MARK),
            sanitizer.FOUND_STATUS,
            "ended with the status for findings and printed none",
        ),
        ("rooflab: rmsnorm/x: UNSUPPORTED: needs a CUDA device\n", 2, "status 2): rooflab: rmsnorm/x: UNSUPPORTED"),
    ],
)
def test_a_run_that_was_cut_short_is_not_clean(text, status, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sanitizer.read(text, "memcheck", status)


def test_a_clean_run_is_clean():
    assert sanitizer.read(CLEAN.format(_launch_once.MARK), "memcheck", 0).clean
    assert sanitizer.read(NO_RACE.format(_launch_once.MARK), "racecheck", 0).clean


@pytest.mark.parametrize("name, text", [("memcheck", MEMCHECK), ("racecheck", RACECHECK), ("synccheck", SYNCCHECK)])
def test_findings_end_the_command_with_11(rooflab, tool, name, text):
    calls = tool("compute-sanitizer", f"print({text!r})\nsys.exit(86)")
    status, out, _ = rooflab(*COMMAND, "--sanitizer", name)
    assert status == 11 and f"{name} found " in out and sanitizer.read(text, name, 86).findings[0].kernel in out
    status, out, _ = rooflab(*COMMAND, "--sanitizer", name, "--json")
    assert status == 11 and json.loads(out)["clean"] is False and json.loads(out)["findings"]
    arguments, environment = json.loads(calls.read_text().splitlines()[0])
    assert arguments[:4] == ["--tool", name, "--error-exitcode", "86"]
    assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and "TRITON_INTERPRET" not in environment
    assert ("--report-api-errors" in arguments) == (name == "memcheck")


def test_a_clean_command_ends_with_0_and_a_cut_one_with_2(rooflab, tool):
    tool("compute-sanitizer", f"print({CLEAN.format(_launch_once.MARK)!r})")
    status, out, _ = rooflab(*COMMAND, "--sanitizer", "initcheck")
    assert status == 0 and "initcheck found nothing" in out
    tool("compute-sanitizer", "print('Segmentation fault', file=sys.stderr); sys.exit(139)")
    status, _, err = rooflab(*COMMAND, "--sanitizer", "initcheck")
    assert status == 2 and "sanitizer: initcheck did not come to its end (status 139): Segmentation fault" in err
    status, out, _ = rooflab(*COMMAND, "--sanitizer", "racecheck", "--command")
    assert status == 0 and shlex.split(out)[:3] == ["compute-sanitizer", "--tool", "racecheck"]
    status, _, err = rooflab(*COMMAND, "--sanitizer", "valgrind")
    assert status == 2 and "sanitizer: expected one of memcheck, racecheck, initcheck, synccheck, got 'valgrind'" in err


def test_a_missing_sanitizer_is_one_sentence(rooflab, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(ncu, "FOLDERS", ())
    status, _, err = rooflab(*COMMAND, "--sanitizer", "memcheck")
    assert status == 2 and "sanitizer: expected compute-sanitizer on the PATH or in /usr/local/cuda, found none" in err

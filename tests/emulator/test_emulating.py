"""Launchers without an op in the emulator: the context `emulating`, the command and pytest's fixture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import blocks

MINE = """
import torch, triton, triton.language as tl

@triton.jit
def _copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))  # no mask

def copy_into(x, out):
    _copy[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out

def copy(x):
    return copy_into(x, torch.empty_like(x))

def warmed(x):
    out = torch.empty_like(x)
    kernel = _copy.warmup(x, out, x.numel(), BLOCK=64, grid=(1,))
    kernel._init_handles()
    assert 8 <= kernel.n_regs <= 64 and kernel.n_spills == 0
    kernel[(x.numel() // 64, 1, 1)](x, out, x.numel(), 64)
    return out

def other_dtype(x):
    kernel = _copy.warmup(x, x, x.numel(), BLOCK=64, grid=(1,))
    kernel[(1, 1, 1)](x.half(), x, 64, 64)

@triton.jit
def _to_fp32(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.float32))

def to_fp32(x):
    out = torch.empty(x.shape, device=x.device)
    _to_fp32[(1,)](triton.reinterpret(x.view(torch.int8), tl.float8e4nv), out, 64)
    return out

@triton.jit
def _gather(pointers, out_ptr, n, BLOCK: tl.constexpr):
    part = tl.load(pointers + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * n + at, tl.load(part + at, mask=at < n), mask=at < n)

def gather(parts, pointers=None):
    if pointers is None:
        pointers = torch.tensor([part.data_ptr() for part in parts], device=parts[0].device)
    out = torch.empty(len(parts), parts[0].numel(), device="cuda")
    _gather[(len(parts),)](pointers, out, parts[0].numel(), BLOCK=16)
    return out

@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])
@triton.heuristics({"EVEN": lambda values: values["n"] % values["BLOCK"] == 0})
@triton.jit
def _add_one(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, (1 if EVEN else 2) + tl.load(x_ptr + at, mask=at < n), mask=at < n)

def add_one(x):
    _add_one[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x.numel())
    return x

@triton.jit
def _unknown(x_ptr):
    tl.store(x_ptr, tl.nonsense(x_ptr))

def not_compiled(x):
    _unknown[(1,)](x)

@triton.jit
def _racing(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.program_id(0))

def racing(x):
    out = torch.empty_like(x)
    _racing[(2,)](x, out, BLOCK=64)
    return out

def chosen(x, n, flag, scale, sizes):
    assert (n, flag, scale, sizes) == (3, True, None, [1, 2]) and type(n) is int
    return copy(x)

def same(x):
    return x

def two(x):
    return copy(x), add_one(x.clone())

def twice(x):
    return x, x
"""
SCRIPT = """
import json, traceback
import torch
import triton
from rooflab.bench.emulate import emulating
import mine

found = {}
x = torch.randn(128)
with emulating() as run:
    assert x.is_cuda and x.device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.device(x.device), torch.cuda.stream(stream):
        event.record()
    torch.cuda.synchronize()
    assert torch.zeros(3, device=x.device).cuda().cpu().tolist() == [0, 0, 0]
    assert torch.equal(mine.copy(x), x) and torch.equal(mine.warmed(x), x)
    # In mappings of their own: near the output, their addresses would be places just before it.
    parts = [torch.empty(1 << 22)[:10].copy_(x[at : at + 10]) for at in (0, 10)]
    assert torch.equal(mine.gather(parts), torch.stack(parts))
    codes = x[:64].to(torch.float8_e4m3fn)
    assert torch.equal(mine.to_fp32(codes), codes.float())
assert not x.is_cuda and not torch.cuda.is_available()
found["kernels"] = [(launch.kernel, launch.grid) for launch in run.launches]
found["bytes"], found["findings"] = run.bytes.global_read, run.findings
for name, configs in {"all": 60.0, "named": {"BLOCK": 64}, "first": None}.items():
    with emulating(configs=configs) as run:
        assert torch.equal(mine.add_one(x.clone()), x + 1)
    found[name] = [launch.ctas for launch in run.launches]
with emulating() as run:
    mine.racing(x[:64].clone())
found["race"] = [str(finding) for finding in run.findings]

def said(function, **options):
    try:
        with emulating(**options):
            function()
    except (RuntimeError, ValueError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return [type(error).__name__, str(error), frame.line]

pointers = torch.tensor([part.data_ptr() for part in parts])
found["outside"] = said(lambda: mine.copy(x[:100].clone()))
found["unknown"] = said(lambda: mine.gather(parts, pointers))
found["told"] = said(lambda: mine.gather(parts, pointers), memory=parts)
found["memory"] = said(lambda: torch.cuda.mem_get_info())
found["dtype"] = said(lambda: mine.other_dtype(x))
found["config"] = said(lambda: mine.add_one(x), configs={"BLOCK": 7})
found["sampled"] = []
for seed in range(8):
    out = torch.zeros(4 * 64)
    with emulating(ctas=1, seed=seed):
        mine.copy_into(torch.ones(4 * 64), out)
    found["sampled"].append(out.view(4, 64).bool().all(1).tolist())
found["driver"] = repr(triton.runtime.driver._active)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("outside")
    (made / "mine.py").write_text(MINE)
    return made


def compiled(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A Python of its own, in which Triton compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    (folder / "script.py").write_text(SCRIPT)
    done = compiled(["script.py"], folder)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.more
def test_the_readmes_example_runs_as_it_stands(folder: Path) -> None:
    """With a package that no one here wrote."""
    (folder / "readme.py").write_text(next(text for _, text in blocks("docs/emulate.md") if "emulating" in text))
    done = compiled(["readme.py"], folder)
    assert done.returncode == 0, done.stderr
    error, findings, moved, launch = done.stdout.splitlines()
    # Since Triton 3.8.0 all lanes store a sum that each has rounded for itself, which is a note.
    assert float(re.findall(r"\(([\d.e-]+)", error)[0]) < 1e-5 and "severity='error'" not in findings
    assert "hbm_read=24960" in moved and launch == "_rms_norm_forward_kernel (64, 1, 1) {}"


def test_any_launcher_runs_on_cpu_tensors_that_say_they_are_on_a_gpu(found: dict[str, Any]) -> None:
    assert [name for name, _ in found["kernels"]] == ["_copy", "_copy", "_gather", "_to_fp32"]
    assert [grid for _, grid in found["kernels"]] == [[2, 1, 1]] * 3 + [[1, 1, 1]]
    assert found["bytes"] >= 2 * 512 + 2 * 40 and found["findings"] == []
    assert found["told"] is None, "memory behind pointers may be given by name"
    assert found["driver"] == "None", "Triton has its own driver again behind the context"


def test_an_autotuned_kernel_runs_with_the_configs_that_are_asked_for(found: dict[str, Any]) -> None:
    """All of them find the memory that the first one found."""
    assert found["all"] == [4, 2] and found["named"] == [2] and found["first"] == [4]


def test_a_race_is_a_finding_and_an_access_out_of_bounds_ends_in_the_users_line(found: dict[str, Any]) -> None:
    (race,) = found["race"]
    assert race.startswith("error [race]: _racing: ") and "out_ptr" in race
    kind, text, line = found["outside"]
    assert kind == "EmulationError" and "mine.py:7" in text and "begin 400 bytes into x_ptr of 400" in text
    assert line.startswith("_copy[(triton.cdiv")


def test_the_ctas_of_a_sample_are_the_first_the_last_and_any_between(found: dict[str, Any]) -> None:
    assert all(first and last and one + other == 1 for first, one, other, last in found["sampled"])
    assert any(one for _, one, _, _ in found["sampled"]) and any(other for _, _, other, _ in found["sampled"])


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("unknown", "EmulationError", "memory="),
        (
            "dtype",
            "ValueError",
            "x_ptr: expected *fp32, for which the kernel was compiled, got a tensor of torch.float16",
        ),
        ("config", "ValueError", "configs: expected one of BLOCK: 32"),
        ("memory", "RuntimeError", "torch.cuda.mem_get_info: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(found: dict[str, Any], what: str, kind: str, words: str) -> None:
    assert found[what][0] == kind and words in found[what][1]


CHOSEN = ["--shape", "x=64", "--arg", "n=3,flag=true,scale=none,sizes=[1,2]"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["mine.py::copy", "--reference", "mine.py::same", "--shape", "x=2x64"], 0, "OK: output 0: error at most 0 of"),
        (["mine.py::copy", "--shape", "x=100"], 11, "copy: RUNTIME_ERROR: [out-of-bounds] _copy: mine.py:7"),
        (["mine.py::racing", "--shape", "x=64"], 11, "mine.py::racing: INCORRECT: "),
        (["mine.py::not_compiled", "--shape", "x=64"], 11, "mine.py::not_compiled: COMPILE_ERROR: "),
        (["mine.py::add_one", "--shape", "x=64", "--config", "BLOCK=7"], 2, "configs: expected one of BLOCK: 32"),
        (["mine.py::add_one", "--reference", "mine.py::same", "--shape", "x=9:bf16"], 11, "output 0: 9 of 9 elements"),
        (["mine.py::two", "--reference", "mine.py::twice", "--shape", "x=64"], 11, "output 1: "),
        (["mine.py::same", "--shape", "x=64"], 2, "expected same to launch a kernel of Triton, got no launch"),
        (["mine.py::copy", "--shape", "y=64"], 2, "shape: expected the arguments of copy(x): missing a required"),
        (["mine.py::copy", "--shape", "x=64,x=9"], 2, "each name once, got 'x=9'"),
        (["mine.py::copy", "--shape", "x=640", "--ctas", "1"], 0, "3 of 10 CTAs"),
        (["mine.py::copy", "--shape", "x=64", "--ctas", "3", "--reference", "mine.py::same"], 2, "no --reference"),
        (["mine.py::chosen", *CHOSEN], 0, "us are predicted on h100-sxm"),
        (
            ["mine.py::chosen", *CHOSEN[:3], "n=4,flag=true,scale=none,sizes=[1,2]"],
            11,
            "RUNTIME_ERROR: assert in mine.py",
        ),
        (["mine.py::chosen", *CHOSEN[:3], "sizes=[1,y]"], 2, "--arg: expected name=value, each name once"),
        (["rmsnorm", "--argument", "eps=1"], 2, "argument: expected with path.py::function alone, got 'eps=1' with"),
        (["mine.py::none", "--shape", "x=64"], 2, "function: expected a function 'none' in"),
    ],
)
def test_the_command_runs_a_function_of_a_file(
    rooflab: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, words: str
) -> None:
    monkeypatch.chdir(folder)
    paths = [str(folder / text) if "::" in text else text for text in arguments]
    got, out, err = rooflab("emulate", *paths)
    assert got == status and words in " ".join((out + err).split()), out + err
    assert all(float(seconds) < 1000 for seconds in re.findall(r"in (\d+\.\d+) s, compilation", out))


@pytest.mark.more
def test_static_and_explain_take_a_function_of_a_file(rooflab: Any, folder: Path) -> None:
    status, out, err = rooflab("static", f"{folder}/mine.py::chosen", *CHOSEN, "--json")
    (static,) = json.loads(out)["results"]
    assert status == 0 and [launch["name"] for launch in static["launches"]] == ["_copy"], err
    tuned = (f"{folder}/mine.py::add_one", "--shape", "x=2x64:bf16")
    status, out, err = rooflab("static", *tuned, "--json")
    (static,) = json.loads(out)["results"]
    assert status == 0 and static["scheme"] == "bf16" and len(static["launches"]) == 2, "one for each config"
    status, out, err = rooflab("explain", *tuned, "--gpu", "h200", "--json")
    (explained,) = json.loads(out)
    assert status == 0 and explained["traffic_basis"] == "counted" and explained["bytes"] == 2 * 2 * 2 * 64, err
    assert explained["parts"][0]["ms"] == pytest.approx(512 / 4.8e12 * 1e3), "at the bandwidth of an H200"
    assert explained["predicted_ms"] > explained["bound_ms"] and len(explained["compiled"]) == 1, "of the first config"
    status, out, err = rooflab("static", f"{folder}/mine.py::not_compiled", "--shape", "x=64")
    assert status == 11 and "COMPILE_ERROR: mine.py/not_compiled" in out + err
    status, _, err = rooflab("static", *tuned, "--suite", "smoke")
    assert status == 2 and "suite: expected with an op alone" in err


@pytest.mark.more
def test_the_fixture_fails_a_test_on_a_race_and_on_an_access_out_of_bounds(folder: Path) -> None:
    (folder / "test_mine.py").write_text("""
import torch, mine

def test_right(emulated):
    x = torch.randn(128, device="cuda")
    assert torch.equal(mine.copy(x), x) and emulated.launches[0].ctas == 2

def test_racing(emulated):
    mine.racing(torch.randn(64))

def test_outside(emulated):
    mine.copy(torch.randn(100))
""")
    done = compiled(["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "test_mine.py"], folder)
    assert "2 failed, 1 passed" in done.stdout and "error [race]: _racing: " in done.stdout, done.stdout + done.stderr
    assert "mine.py:10: EmulationError" in done.stdout

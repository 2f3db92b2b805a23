"""The README is true: its commands run and its code blocks do what they show."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from rooflab.kernels import registry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.startswith(".venv/bin/rooflab ")
]
PYTHON = [block for language, block in BLOCKS if language == "python"]


def test_the_first_two_blocks_are_the_main_job_and_the_tests():
    assert [block.strip() for _, block in BLOCKS[:2]] == ["make lab", "make test"]
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"lab", "test"} <= set(targets)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the README's own kernel in it; what that registers is taken out again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(next(block for block in PYTHON if block.startswith("# mine.py")))
    yield tmp_path
    for kernels in registry._kernels.values():
        kernels.pop("mine", None)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_runs(arguments, folder, rooflab):
    status, out, err = rooflab(*arguments)
    assert status == 0 and len(out.splitlines()) > 2, err


def test_the_kernel_it_shows_is_right(folder, rooflab):
    status, out, _ = rooflab("check", "--kernel", "mine.py")
    assert status == 0, out


@pytest.mark.slow  # test_engine_oracle.py asks the same of the same model
def test_the_python_it_shows_runs(capfd):
    block = next(block for block in PYTHON if "LLM(" in block)
    assert "max_tokens=32" in block
    exec(compile(block.replace("max_tokens=32", "max_tokens=9"), "README.md", "exec"), {})  # its answer, and no more
    assert "The capital of France is Paris." in capfd.readouterr().out


def test_every_file_it_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


PTX = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry doubled(.param .u64 x, .param .u64 out, .param .u32 count) .reqntid 32
{
    .reg .pred %p;  .reg .b32 %t, %c, %n;  .reg .b64 %a, %b, %i;  .reg .f32 %v;
    mov.u32 %t, %tid.x;  mov.u32 %c, %ctaid.x;  mad.lo.u32 %t, %c, 32, %t;
    ld.param.u32 %n, [count];  setp.ge.u32 %p, %t, %n;
    @%p ret;
    ld.param.u64 %a, [x];  ld.param.u64 %b, [out];  mul.wide.u32 %i, %t, 4;
    add.s64 %a, %a, %i;  add.s64 %b, %b, %i;
    ld.global.f32 %v, [%a];  add.f32 %v, %v, %v;  st.global.f32 [%b], %v;
    ret;
}
"""


def test_the_emulation_it_shows_runs(capfd):
    x, out = torch.arange(100.0), torch.zeros(100)
    block = next(block for block in PYTHON if "emulate(" in block)
    exec(compile(block, "README.md", "exec"), {"ptx_text": PTX, "x": x, "out": out})
    assert torch.equal(out, 2 * x)
    assert "Bytes(hbm_read=416, hbm_write=416, global_read=400," in (printed := capfd.readouterr().out)
    assert printed.endswith(" ()\n"), "no race"


def test_every_op_and_kernel_is_in_its_table():
    table = README.split("## What is in it")[1].split("\n## ")[0]
    rows = [set(re.findall(r"\w+", line)) for line in table.splitlines() if line.startswith("| `")]
    for op in registry.ops():
        (row,) = [words for words in rows if op in words]
        assert row >= registry.kernels(op).keys() - {"naive", "library"}, op

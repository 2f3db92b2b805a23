"""The documents are true: code blocks do what they show, and the files and names in them exist.

`test_pages_commands.py` tries the commands.
"""

import re
from functools import partial

import pytest
import torch
from op_kernels import own_registry
from pages import COMMANDS, MORE, PAGES, PYTHON, ROOT
from test_ab_run import here
from test_pages_commands import folder
from test_pytest_plugin import project

from rooflab.bench import ab
from rooflab.bench.ab import pairs
from rooflab.bench.lab import HEADER
from rooflab.bench.report.ladders import ladder_lines
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES
from rooflab.roofline.architecture import PRESETS
from rooflab.roofline.device import DEVICES

assert project and folder and own_registry  # fixtures
pytest_plugins = ["pytester"]


def test_what_make_lab_printed_has_the_columns_of_today():
    printed = PAGES[ROOT / "README.md"].split("printed, among others:")[1].split("```")[1]
    rows = [line.split()[0] for line in printed.splitlines() if re.match(r"\w+ {3,}", line)]
    assert HEADER in printed and rows[0] == "op" and set(rows[1:]) <= set(registry.ops())


def test_pages_are_short():
    """A kernel engineer gives the README a minute."""
    lengths = {path.name: text.count("\n") for path, text in PAGES.items()}
    assert lengths.pop("README.md") <= 150 and max(lengths.values()) <= 200, lengths


@pytest.mark.parametrize("file", ["mine.py", "squared_relu.py"])
@pytest.mark.parametrize("words", ["list", "explain --gpu h100"])
@pytest.mark.usefixtures("own_registry")
def test_a_file_tells_its_op(words, file, folder, rooflab, monkeypatch):
    monkeypatch.setitem(SCHEMES, "fp16_fp32", None)  # taken out again
    status, out, err = rooflab(*words.split(), "--kernel", file)
    assert status == 0 and ("mine" if file == "mine.py" else "naive") in out, err


@pytest.mark.usefixtures("own_registry")
def test_an_error_in_what_a_file_gives_its_op_is_one_sentence_with_its_line(folder, rooflab, monkeypatch):
    monkeypatch.setitem(SCHEMES, "fp16_fp32", None)
    text = (folder / "squared_relu.py").read_text().replace("x.double()", "x.doubled()")
    (folder / "typo.py").write_text(text)
    line = text[: text.index("x.doubled()")].count("\n") + 1
    status, _, err = rooflab("check", "--kernel", "typo.py", "--case", "T=5,H=33", "--scheme", "fp32")
    assert status == 2 and f"rooflab: typo.py:{line}: AttributeError: " in err and "Traceback" not in err


def test_the_benchmark_it_shows_runs(folder, project, pytester, monkeypatch):
    monkeypatch.setattr("rooflab.bench.core.measure.ceilings_for", lambda device: None)  # measuring them takes seconds
    pytester.makepyfile(mine=(folder / "mine.py").read_text())
    pytester.makepyfile(test_mine=next(block for block in PYTHON if "kernel_benchmark" in block))
    project("--benchmark").assert_outcomes(passed=1)


def test_the_comparison_it_shows_runs(monkeypatch, capfd):
    """With one pair, and what its processes do is done in this one."""
    monkeypatch.setattr(pairs, "ask_process", here)
    monkeypatch.setattr(ab, "compare", partial(ab.compare, pairs=1, kernel_s=0.05))
    block = next(block for block in PYTHON if "compare(" in block)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    said = capfd.readouterr()
    assert "my_softmax against reference: UNRESOLVED: " in said.out and "pair 1 of 1, side B" in said.err


def test_every_file_and_target_that_the_documents_name_is_there():
    text = ""
    for path, page in (PAGES | MORE).items():
        own = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
        text += own
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", own):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
    for target in re.findall(r"`((?:bench|engine|kernels|reference|roofline|tests|\.ci)/[\w./]+)`", text):
        assert (ROOT / target).exists(), target
    asked = re.findall(r"(?:`|^)make ([a-z -]+)", text + "\n".join(COMMANDS), re.MULTILINE)
    asked = " ".join(line.partition(" -")[0] for line in asked).split()
    assert {*asked} <= {*re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)}


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
    block = next(block for block in PYTHON if "emulate(" in block and "Launch" in block)
    exec(compile(block, "README.md", "exec"), {"ptx_text": PTX, "x": x, "out": out})
    assert torch.equal(out, 2 * x)
    assert "Bytes(hbm_read=416, hbm_write=416, global_read=400," in (printed := capfd.readouterr().out)
    assert printed.endswith(" ()\n"), "no race"


def test_every_name_that_an_option_takes_is_on_one_page():
    page = (ROOT / "docs/names.md").read_text()
    suites = {suite for spec in registry.ops().values() for suite in spec.cases}
    schemes = SCHEMES.keys() - {"fp16_fp32"}  # the page's own op brings it
    assert {*DEVICES, *PRESETS, *suites, *schemes} - {*re.findall(r"`([^` ]+)`", page)} == set()


def test_every_op_is_in_its_table_with_its_peers_and_every_other_kernel_in_its_ladder():
    table = PAGES[ROOT / "docs/kernels.md"]
    rows = [set(re.findall(r"\w+", line)) for line in table.splitlines() if line.startswith("| [`")]
    for op in registry.ops():
        (row,) = [words for words in rows if op in words]
        peers = {name for name, kernel in registry.kernels(op).items() if kernel.role == "peer"}
        assert row >= peers, op
        assert ladder_lines(op).keys() >= registry.kernels(op).keys() - peers, op

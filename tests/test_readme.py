"""The documents are true: commands of README and docs run, code blocks do what they show, and what they name is there.

What is for a reader's own repository runs from the wheel, in a fresh repository.

The short suite leaves out the commands in `LEFT_OUT`; without `.venv/bin/`, a command needs a GPU, a git history or
files that only its user has, and `test_packaging.py` reads its options.
"""

import os
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from git_repository import git
from op_kernels import own_registry
from test_ab_run import here
from test_packaging import fresh, wheel
from test_pytest_plugin import project

from rooflab.bench import ab
from rooflab.bench.ab import pairs
from rooflab.bench.lab import HEADER
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES

assert project and fresh and wheel and own_registry  # fixtures
pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def blocks(name):
    """Language and text of each code block of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```", PAGES[ROOT / name], re.DOTALL | re.MULTILINE)


BLOCKS = [block for path in PAGES for block in blocks(path.relative_to(ROOT))]
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.startswith(".venv/bin/rooflab ")
]
PYTHON = [block for language, block in BLOCKS if language == "python"]
OWN_OP = dict(blocks("docs/own_op.md"))
FILES = {name[1]: block for block in PYTHON if (name := re.match(r"# (\S+\.py)\n", block))}
OWN = [
    line
    for page in ("README.md", "docs/ab.md")
    for line in PAGES[ROOT / page].split("own repository\n")[1].split("```sh\n")[1].split("```")[0].splitlines()
]
WORKFLOW = re.findall(r"- run: (.*)", next(block for language, block in BLOCKS if language == "yaml"))
LINES = [*dict.fromkeys(line.split(" #")[0].strip() for line in (*OWN, *WORKFLOW[1:], *OWN_OP["sh"].splitlines()))]
"""The commands for somebody's own repository."""
LEFT_OUT = {
    "check gemm": "minutes: every kernel on every case",
    "bench rmsnorm": "10 s: it first measures this machine's ceilings",
    "generate": "it loads a model; test_engine_oracle.py asks the same of the same model",
    "doctor": "8 s: it loads a model; test_tokenizer.py asks the same of a small one",
    "emulate": "7 s: it compiles; test_emulate.py has such commands",
    "ab": "a minute of fresh processes",
    "static": "6 s: it compiles",
    "suite": "a minute of fresh processes",
    "roofline": "3 s of figures, which test_cli.py draws",
    "bench --kernel": "it measures this machine's ceilings",
    "check --kernel": "10 s; it runs from the wheel",
    "ceilings": "6 s: it measures them",
}
"""The commands that only the slow suite runs, by how they begin, with the reason."""


def left_out(arguments):
    return [start for start in LEFT_OUT if f"{shlex.join(arguments)} ".startswith(f"{start} ")]


def test_the_first_two_blocks_are_the_main_job_and_the_tests():
    assert [block.strip() for _, block in BLOCKS[:2]] == ["make lab", "make test"]


def test_what_make_lab_printed_has_the_columns_of_today():
    printed = PAGES[ROOT / "README.md"].split("printed, among others:")[1].split("```")[1]
    rows = [line.split()[0] for line in printed.splitlines() if re.match(r"\w+ {3,}", line)]
    assert HEADER in printed and rows[0] == "op" and set(rows[1:]) <= set(registry.ops())


def test_pages_are_short():
    """A kernel engineer gives the README a minute."""
    lengths = {path.name: text.count("\n") for path, text in PAGES.items()}
    assert lengths.pop("README.md") <= 150 and max(lengths.values()) <= 200, lengths


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the README's own kernel in it; what that registers is taken out again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILES["mine.py"])
    (tmp_path / "squared_relu.py").write_text(FILES["squared_relu.py"])
    yield tmp_path
    for kernels in registry._kernels.values():
        kernels.pop("mine", None)


def test_what_is_left_out_is_in_the_readme():
    assert {start for arguments in COMMANDS for start in left_out(arguments)} == LEFT_OUT.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(words, marks=[pytest.mark.slow, pytest.mark.timeout(900)] if left_out(words) else [])
        for words in COMMANDS
    ],
    ids=" ".join,
)
def test_a_command_runs(arguments, folder, rooflab):
    status, out, err = rooflab(*arguments)
    # The status of an A/B is its verdict, which another CPU or a busy one changes: SLOWER is 10, NOISY 13.
    assert status in ((0, 10, 13) if arguments[0] == "ab" else (0,)) and len(out.splitlines()) > 2, err


@pytest.mark.parametrize("file", ["mine.py", "squared_relu.py"])
@pytest.mark.parametrize("words", [["list"], ["explain", "--gpu", "h100"], ["roofline", "--gpu", "h100"]], ids=" ".join)
@pytest.mark.usefixtures("own_registry")
def test_a_file_tells_its_op(words, file, folder, rooflab, monkeypatch):
    monkeypatch.setattr("rooflab.bench.report.figures.draw", lambda *of: [folder])
    monkeypatch.setitem(SCHEMES, "fp16_fp32", None)  # taken out again
    status, out, err = rooflab(*words, "--kernel", file)
    assert status == 0 and ("point" if words[0] == "roofline" else "mine" if file == "mine.py" else "naive") in out, err


@pytest.fixture
def repository(fresh, tmp_path):
    """Runs a command of the wheel's environment in a fresh repository with the documents' files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in ("init --quiet", "add .", "commit --quiet --message one"):
        git(tmp_path, *words.split())
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PATH": f"{fresh}{os.pathsep}{os.environ['PATH']}"}

    def run(line):
        line = re.sub(r"--budget \d+", "--budget 5", line).replace("rooflab check ", "rooflab check --seconds 5 ")
        return subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.sampled(0, 3)  # 5 to 30 s each: new processes
@pytest.mark.parametrize("line", LINES)
def test_a_line_runs_from_the_wheel_in_a_fresh_repository(line, repository):
    done = repository(line)
    # An A/B of so short a budget says what it lacks, and a busy machine is NOISY: 13.
    assert done.returncode in ((0, 10, 13) if line.startswith(("rooflab ab", "rooflab bench")) else (0,)), done.stderr
    assert done.stdout


@pytest.mark.more
def test_a_change_of_ones_own_kernel_is_compared_with_its_base(repository, tmp_path):
    """From the wheel, the base's own file on one side: the change alone is wrong."""
    command = "rooflab ab --base HEAD --kernel mine.py --changed --pairs 1 --kernel-seconds 0.05"
    done = repository(command)
    assert done.returncode == 0 and "the difference touches no kernel" in done.stdout, done.stderr
    (tmp_path / "mine.py").write_text(FILES["mine.py"].replace("* weight", "* 2 * weight"))
    done = repository(command)
    assert done.returncode == 11 and "INCORRECT  working tree" in done.stdout, done.stdout + done.stderr


@pytest.mark.more
def test_the_fault_it_shows_is_named_as_it_shows(repository):
    done = repository("rooflab emulate softmax.py::softmax --shape x=4x100")
    shown = PAGES[ROOT / "README.md"].split("The load has no mask:")[1].split("```")[1]
    assert done.returncode == 11
    without_address = [re.sub(r"0x\w+", "", " ".join(text.split())) for text in (done.stdout + done.stderr, shown)]
    assert without_address[1] in without_address[0]


def test_the_benchmark_it_shows_runs(folder, project, pytester, monkeypatch):
    monkeypatch.setattr("rooflab.bench.plugin.timing.ceilings_for", lambda device: None)  # measuring them takes seconds
    pytester.makepyfile(mine=(folder / "mine.py").read_text())
    pytester.makepyfile(test_mine=next(block for block in PYTHON if "kernel_benchmark" in block))
    project("--benchmark").assert_outcomes(passed=1)


def test_the_comparison_it_shows_runs(monkeypatch, capfd):
    """With one pair, and what its processes do is done in this one."""
    monkeypatch.setattr(pairs, "_answers", here)
    monkeypatch.setattr(ab, "compare", partial(ab.compare, pairs=1, kernel_s=0.05))
    block = next(block for block in PYTHON if "compare(" in block)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    said = capfd.readouterr()
    assert "my_softmax against reference: UNRESOLVED: " in said.out and "pair 1 of 1, side B" in said.err


@pytest.mark.slow  # test_engine_oracle.py asks the same of the same model
def test_the_python_it_shows_runs(capfd):
    block = next(block for block in PYTHON if "LLM(" in block)
    assert "max_tokens=32" in block
    exec(compile(block.replace("max_tokens=32", "max_tokens=9"), "README.md", "exec"), {})  # its answer, and no more
    assert "The capital of France is Paris." in capfd.readouterr().out


def test_every_file_and_target_that_the_documents_name_is_there():
    pages, text = (
        PAGES | {path: path.read_text() for path in (ROOT / "CONTRIBUTING.md", ROOT / "results/README.md")},
        "",
    )
    for path, page in pages.items():
        own = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
        text += own
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", own):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
    for target in re.findall(r"`((?:bench|engine|kernels|reference|roofline|tests|\.ci)/[\w./]+)`", text):
        assert (ROOT / target).exists(), target
    asked = " ".join(re.findall(r"(?:`|^)make ([a-z -]+)", text, re.MULTILINE)).split()
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


def test_every_op_and_kernel_is_in_its_table():
    table = PAGES[ROOT / "docs/kernels.md"]
    rows = [set(re.findall(r"\w+", line)) for line in table.splitlines() if line.startswith("| `")]
    for op in registry.ops():
        (row,) = [words for words in rows if op in words]
        assert row >= registry.kernels(op).keys() - {"naive", "library"}, op

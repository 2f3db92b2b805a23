"""Every command of README, docs, results/README and CONTRIBUTING is tried; one table says how, and why not otherwise.

`HERE` and `LONGER` run in this process in an empty folder, `WHEEL` from the wheel in a fresh repository, `SLOW` only in
`make test-full`. `GPU` is a dry run. Of `PARSED` the options and files are looked at, and nothing runs.
"""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from git_repository import git
from op_kernels import own_registry  # noqa: F401
from pages import COMMANDS, FILES, PAGES, ROOT, blocks, lines, words_of
from test_packaging import fresh, wheel

from rooflab.bench.cli.app import app
from rooflab.bench.core import record_files as files
from rooflab.bench.exchange.pytest_benchmark import write_pytest_benchmark

assert fresh and wheel  # fixtures

HERE = (
    "rooflab estimate", "rooflab explain", "rooflab ledger llama-3.1-8b", "rooflab whatif llama-3.1-8b",
    "rooflab history", "rooflab report", "rooflab import pytest-benchmark", "rooflab ab --records",
    "rooflab import csv", "rooflab bisect",
)  # fmt: skip
LONGER = ("rooflab picture published", "rooflab picture schedule", "rooflab roofline --gpu")
"""As `HERE`, of 1 to 3 s each: in `make test-more`."""
WHEEL = (
    "rooflab check --kernel", "rooflab bench --kernel", "rooflab ab rmsnorm --kernel mine.py",
    "rooflab ab --kernel squared_relu.py", "rooflab static --compare HEAD", "rooflab static --kernel",
    "rooflab roofline --kernel", "rooflab emulate fast.py::launcher",
    "python -m pytest", "pytest --benchmark",
)  # fmt: skip
BELOW = {
    "rooflab ab --base HEAD": "test_a_change_of_ones_own_kernel_is_compared_with_its_base",
    "rooflab emulate softmax.py::softmax": "test_the_fault_it_shows_is_named_as_it_shows",
}
"""From the wheel too, by tests that ask for more."""
SLOW = {
    "rooflab check gemm": "minutes: every kernel on every case",
    "rooflab bench rmsnorm": "10 s: it first measures this machine's ceilings",
    "rooflab generate": "it loads a model; test_engine_oracle.py asks the same of the same model",
    "rooflab doctor": "8 s: it loads a model; test_tokenizer.py asks the same of a small one",
    "rooflab emulate": "7 s: it compiles; test_emulate.py has such commands",
    "rooflab ab rmsnorm --kernel naive": "a minute of fresh processes",
    "rooflab static rmsnorm": "6 s: it compiles",
    "rooflab suite --dry-run": "a minute of fresh processes",
    "rooflab ceilings": "6 s: it measures them",
    "rooflab simulate": "9 s; test_clock.py asks less",
    "rooflab ledger --batch": "it times a model; test_ledger.py does so with a small one",
}
GPU = {
    "rooflab suite results/bars/plan.json": "--plan",
    "rooflab tune": "--dry-run --kernel tensor_core --case M=64,N=96,K=128,layout=NT,bias=false --budget 1",
    "rooflab profile": "",
    "rooflab sweep": "",
}
"""Commands for a card, with what makes a dry run of them; without it, their options are looked at."""
PARSED = {
    "make": "the targets are looked at; .ci/run runs them",
    "rooflab ab --base main": "it needs a branch; the same with HEAD runs from the wheel",
    "rooflab ab --self-test": "minutes of fresh processes; test_ab_cli.py has short ones",
    "rooflab ab --base HEAD^": "in a merge commit; the same with HEAD runs from the wheel",
    "rooflab static --compare HEAD^": "in a merge commit; the same with HEAD runs from the wheel",
    "cat": "the step summary of a workflow",
    "python3 -m venv env": "it needs a network",
    "rooflab static --compare main": "it needs a branch; the same with HEAD runs from the wheel",
    "rooflab static --toolchain": "it needs another environment; test_static_compare.py has one",
    "rooflab picture bytes": "minutes in the emulator; test_pictures.py draws smaller ones",
    "rooflab picture schedule flash_attention --kernel tma --kernel": "into a committed folder; as that of kernels.md",
    "rooflab picture published --gpu h100 --out": "into a committed folder; as that of published.md",
    "rooflab bench": "minutes of times, into a committed folder",
    "rooflab capacity": "3 minutes; test_clock.py asks less",
    "rooflab whatif --swap": "it times a model with two kernels; test_ledger.py does so with a small one",
    "rooflab study": "minutes; test_studies.py runs them with a small model",
    "rooflab capture": "it needs the user's program; test_ledger.py has one",
    "rooflab emulate mine.py::launcher": "a file of the user's; the same of fast.py runs from the wheel",
    "rooflab emulate --kernel": "a file of the user's, in Triton; test_own_repository.py has one",
    "rooflab import published": "it needs a package from the network; test_published.py has such files",
    "rooflab serve": "a server, which ends by a signal; test_serve.py starts such ones",
    "rooflab load": "it needs a server; test_load_run.py has one",
    "rooflab latency": "it times a model; test_load_run.py does so with a small one",
    "rooflab throughput": "it times a model; test_load_run.py does so with a small one",
    "rooflab xray": "it needs a trace; test_load_run.py makes one",
    "rooflab check rmsnorm": "half a minute in the emulator; test_emulate.py has checks of one case",
    "pytest": "such a part of the tests as one who adds a rung wants; `make test` runs them all",
    "pytest bench": "minutes: every benchmark of gemm",
    "pip": "it needs a network; release.yml installs the wheel",
    "git": "it needs a network",
    "curl": "it needs a server; test_serve.py asks the same",
    "python": "minutes to hours; the script's own parser takes the options",
}
TABLE = [*HERE, *LONGER, *WHEEL, *BELOW, *SLOW, *GPU, *PARSED]


def entry(command):
    """The table's longest entry that begins the command; None where there is none."""
    words = re.sub(r"^(\w+=\S* )+", "", command)
    return max((start for start in TABLE if f"{words} ".startswith(f"{start} ")), key=len, default=None)


def of(group):
    return [command for command in COMMANDS if entry(command) in group]


def takes(words):
    """Our parser takes the words of a command."""
    command = typer.main.get_command(app).commands[words[0]]
    given = command.make_context(words[0], words[1:]).params
    assert words[0] != "ab" or len(given["records"] or ()) in (0, 2), "--records takes one each"


def test_every_command_has_one_entry_and_every_entry_a_command():
    assert len(set(TABLE)) == len(TABLE)
    assert [command for command in COMMANDS if entry(command) is None] == []
    assert {*TABLE} - {entry(command) for command in COMMANDS} == set()


def test_every_command_of_ours_is_one_that_we_take():
    ours = [words_of(part) for command in COMMANDS for part in command.split(" && ") if "rooflab " in part]
    ours = [words[: words.index(">")] if ">" in words else words for words in ours if words[0] == "rooflab"]
    assert len(ours) > 60
    for words in ours:
        takes(words[1:])


@pytest.fixture
def folder(tmp_path, monkeypatch, own_registry):  # noqa: F811
    """A git repository with the pages' own files and some results; what those register is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def records(folder):
    """Where the pages have results, committed ones of this project; and two commits, the first of them v1."""
    for place in ("results", ".rooflab", "before", "after"):
        shutil.copytree(ROOT / "results/lab", folder / place)
    for file in (folder / "after").iterdir():  # another run with the same times
        file.write_text(file.read_text().replace(file.stem, f"{file.stem[:-8]}00000000"))
    for words in ("init --quiet", "add .", "commit --quiet --message 1", "tag v1", "commit --quiet --allow-empty -m 2"):
        git(folder, *words.split())
    (folder / "T.csv").write_text("op,name,time_us,T,H,eps\nrmsnorm,mine,12.5,8,64,1e-5\nsoftmax,mine,9.5,8,64,\n")
    write_pytest_benchmark(files.read_all(folder / "results"), folder / "BENCH.json")
    return folder


def shape(text):
    """Lines of a printed text with its numbers and rules taken out: names, units and columns are left."""
    plain = (re.sub(r"[+-]?\d[\d,.]*(e[+-]?\d+)?", "#", line) for line in text.splitlines())
    return [" ".join(line.split()) for line in plain if line.strip(" ─━┄")]


@pytest.mark.parametrize(
    "command",
    [
        *of(HERE),
        *(pytest.param(line, marks=pytest.mark.more) for line in of(LONGER)),
        *(pytest.param(line, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for line in of(SLOW)),
    ],
    ids=str,
)
def test_a_command_runs(command, records, rooflab):
    status, out, err = rooflab(*words_of(command)[1:])
    # The status of an A/B is its verdict, which another CPU or a busy one changes: SLOWER is 10, NOISY 13.
    assert status in ((0, 10, 13) if "rooflab ab " in command else (0,)) and len(out.splitlines()) > 0, err
    for printed in OUTPUTS.get(command, ()):
        shown, found = shape(printed), shape(out)
        assert [line for line in shown if line != "..." and line not in found] == [], out


@pytest.mark.parametrize("command", [command for command in of(GPU) if GPU[entry(command)]])
def test_a_command_for_a_card_runs_dry(command, records, rooflab):
    shutil.copytree(ROOT / "results/bars", records / "results/bars")
    status, out, err = rooflab(*words_of(command)[1:], *GPU[entry(command)].split())
    assert status == 0 and len(out.splitlines()) > 2, err


SHORT = {
    "rooflab check": "rooflab check --seconds 10",  # the first check waits for a compiler
    "rooflab bench": "rooflab bench --budget 0.02",
    "pytest": "python -m pytest",
}
"""How a command begins, and how a test of a few seconds begins it."""


@pytest.fixture
def repository(fresh, folder):
    """Runs a command of the wheel's environment in a fresh repository with the pages' files."""
    for words in ("init --quiet", "add .", "commit --quiet --message one"):
        git(folder, *words.split())
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PATH": f"{fresh}{os.pathsep}{os.environ['PATH']}"}

    def run(line):
        line = re.sub(r"--budget \d+", "--budget 3", line)
        for begins, short in SHORT.items():
            line = re.sub(f"^{begins} ", f"{short} ", line)
        return subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.sampled(0, 1)  # 5 to 30 s each: new processes; `make newest` runs all
@pytest.mark.parametrize("line", of(WHEEL), ids=str)
def test_a_line_runs_from_the_wheel_in_a_fresh_repository(line, repository):
    done = repository(line)
    # An A/B of so short a budget says what it lacks, and a busy machine is NOISY: 13.
    allowed = (0, 10, 13) if line.startswith(("rooflab ab", "rooflab bench")) else (0,)
    assert done.returncode in allowed, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.more
def test_a_change_of_ones_own_kernel_is_compared_with_its_base(repository, folder):
    """From the wheel, the base's own file on one side: the change alone is wrong."""
    command = "rooflab ab --base HEAD --kernel mine.py --changed --pairs 1 --kernel-seconds 0.05"
    done = repository(command)
    assert done.returncode == 0 and "the difference touches no kernel" in done.stdout, done.stderr
    (folder / "mine.py").write_text(FILES["mine.py"].replace("* weight", "* 2 * weight"))
    done = repository(command)
    assert done.returncode == 11 and "INCORRECT  working tree" in done.stdout, done.stdout + done.stderr


@pytest.mark.more
def test_the_fault_it_shows_is_named_as_it_shows(repository):
    done = repository("rooflab emulate softmax.py::softmax --shape x=4x100")
    shown = PAGES[ROOT / "README.md"].split("The load has no mask:")[1].split("```")[1]
    assert done.returncode == 11
    without_address = [re.sub(r"0x\w+", "", " ".join(text.split())) for text in (done.stdout + done.stderr, shown)]
    assert without_address[1] in without_address[0]


class Taken(Exception):
    """A script's parser has taken its options."""


SCRIPTS = [part for command in COMMANDS for part in command.split(" && ") if re.search(r"^(\w+=\S* )*python ", part)]
SCRIPTS = [part for part in SCRIPTS if entry(part) == "python"]


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_takes_the_options_it_is_shown_with(command, monkeypatch):
    words = words_of(command)[1:]
    name = words[1] if words[0] == "-m" else Path(words[0]).relative_to("results").stem
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *given):
        parse(self, *given)
        raise Taken

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [name, *words[2 if words[0] == "-m" else 1 :]])
    with pytest.raises(Taken):
        importlib.import_module(name).main()


def outputs():
    """Of each command what a page shows beneath it: a block `text` follows the block of one command."""
    found = {}
    for path in PAGES:
        own = blocks(path.relative_to(ROOT))
        for (language, block), (before, command) in zip(own[1:], own, strict=False):
            if language == "text":
                assert before == "sh" and len(lines(command)) == 1, f"{path.name}: one command before {block[:60]!r}"
                found.setdefault(re.split(r"\s+#\s", lines(command)[0])[0].strip(), []).append(block)
    return found


OUTPUTS = outputs()


def test_a_printed_output_belongs_to_a_command_that_runs_here():
    """README's two others, of minutes and of the wheel, are compared by tests of their own."""
    assert OUTPUTS and {entry(command) for command in OUTPUTS} <= {*HERE, *LONGER}
    bare = [path.name for path in PAGES for language, _ in blocks(path.relative_to(ROOT)) if not language]
    assert bare == ["README.md"] * 2

"""Every command of README, docs, results and CONTRIBUTING is tried: our parser takes all of them.

`HERE` and `LONGER` run in this process in an empty folder, `WHEEL` from the wheel in a fresh repository. `GPU` is a dry
run. Commands that take minutes, a network, a server or a user's file are run by the tests of their own folder.
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
from rooflab.kernels import registry

assert fresh and wheel  # fixtures

HERE = (
    "rooflab estimate",
    "rooflab explain",
    "rooflab ledger llama-3.1-8b",
    "rooflab whatif llama-3.1-8b",
    "rooflab history",
    "rooflab report",
    "rooflab import pytest-benchmark",
    "rooflab ab --records",
    "rooflab import csv",
)
LONGER = ("rooflab roofline --gpu",)
"""As `HERE`, of 1 to 3 s: in `make test-more`."""
WHEEL = (
    "rooflab check --kernel",
    "rooflab bench --kernel",
    "rooflab ab rmsnorm --kernel mine.py",
    "rooflab ab --kernel squared_relu.py",
    "rooflab static --compare HEAD",
    "rooflab static --kernel",
    "rooflab roofline --kernel",
    "rooflab emulate fast.py::launcher",
    "python -m pytest",
    "pytest --benchmark",
)
GPU = {
    "rooflab suite results/targets/plan.json": "--plan",
    "rooflab tune": "--dry-run --kernel tensor_core --case M=64,N=96,K=128,layout=NT,bias=false --budget 1",
    "rooflab profile": "",
}
"""Commands for a card, with what makes a dry run of them; without it, their options are looked at."""
TABLE = [*HERE, *LONGER, *WHEEL, *GPU]


def entry(command):
    """The table's longest entry that begins the command; None where it is only parsed."""
    words = re.sub(r"^(\w+=\S* )+", "", command)
    return max((start for start in TABLE if f"{words} ".startswith(f"{start} ")), key=len, default=None)


def of(group):
    return [command for command in COMMANDS if entry(command) in group]


def takes(commands, words):
    """Our parser takes the words of a command."""
    given = commands[words[0]].make_context(words[0], words[1:]).params
    assert words[0] != "ab" or len(given["records"] or ()) in (0, 2), "--records takes one each"


def test_every_entry_has_a_command():
    assert len(set(TABLE)) == len(TABLE) and {entry(command) for command in COMMANDS} >= set(TABLE)


def test_every_command_of_ours_is_one_that_we_take():
    ours = [words_of(part) for command in COMMANDS for part in command.split(" && ") if "rooflab " in part]
    ours = [words[: words.index(">")] if ">" in words else words for words in ours if words[0] == "rooflab"]
    assert len(ours) > 60
    commands = typer.main.get_command(app).commands  # made once: it takes 0.2 s
    for words in ours:
        takes(commands, words[1:])


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
    for file in (folder / "after").glob("*.jsonl"):  # another run with the same times
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
    "command", [*of(HERE), *(pytest.param(line, marks=pytest.mark.more) for line in of(LONGER))], ids=str
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
    shutil.copytree(ROOT / "results/targets", records / "results/targets")
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
SCRIPTS = [part for part in SCRIPTS if entry(part) is None]


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_takes_the_options_it_is_shown_with(command, monkeypatch):
    words = words_of(command)[1:]
    if words[0] == "results/learn/levels.py":  # it has no parser: its words are names of ops
        assert (ROOT / words[0]).is_file() and set(words[1:]) <= registry.ops().keys()
        return
    name = words[1] if words[0] == "-m" else ".".join(Path(words[0]).relative_to("results").with_suffix("").parts)
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

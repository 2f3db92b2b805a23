"""A stranger's empty repository with the wheel: their tests, their commits, their settings of matplotlib."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from git_repository import git
from test_packaging import fresh, wheel

assert fresh and wheel  # fixtures
Run = Callable[..., subprocess.CompletedProcess[str]]
TESTS = """
import pytest, torch
from rooflab.roofline.model import Cost

def naive(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)

def fast(x):
    return x.softmax(-1)

@pytest.mark.parametrize("impl", [naive, fast], ids=["naive", "fast"])
def test_softmax(impl, kernel_benchmark):
    kernel_benchmark(impl, torch.randn(64, 512), cost=Cost(vector_flops=1e6, read_bytes=131072, write_bytes=131072))
"""
MINE = """
import torch
from rooflab.kernels.registry import register

@register(op="rmsnorm", name="mine", role="optimized", backend="torch")
def rmsnorm(x, weight, eps=1e-6):
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)
"""
SETTINGS = "text.usetex: True\naxes.facecolor: black\ntext.color: white\nfigure.facecolor: black\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    for name, text in {"test_theirs.py": TESTS, "mine.py": MINE, "matplotlibrc": SETTINGS}.items():
        (folder / name).write_text(text)
    (folder / ".gitignore").write_text("*.json\n*.svg\nout/\n__pycache__/\n")
    for words in ("init --quiet", "add .", "commit --quiet --message one"):
        git(folder, *words.split())
    return folder


@pytest.fixture(scope="module")
def run(fresh: Path, repository: Path) -> Run:
    """Runs a program of the wheel's environment in the repository."""
    ours = ("TRITON_INTERPRET", "PYTHONPATH", "PYTEST")  # a worker of xdist tells by its environment what it is
    around = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    around |= {"PATH": f"{fresh}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(*words: str, folder: Path = repository) -> subprocess.CompletedProcess[str]:
        command = [fresh / "python", "-m", *words] if words[0] == "pytest" else [fresh / words[0], *words[1:]]
        return subprocess.run(command, cwd=folder, env=around, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.more
def test_their_benchmarks_are_compared_and_drawn(run, repository):
    """Two runs of them, imported."""
    for name in ("a", "b"):
        done = run("pytest", "-q", "-p", "no:cacheprovider", "--benchmark", f"--benchmark-json={name}.json")
        assert done.returncode == 0, done.stdout + done.stderr
        done = run("rooflab", "import", "pytest-benchmark", f"{name}.json", "--out", f"out/{name}")
        assert done.returncode == 0, done.stderr
    done = run("rooflab", "ab", "--records", "out/a", "--records", "out/b", "--json")
    (rows,) = json.loads(done.stdout)["tables"].values()
    assert sorted(row["key"] for row in rows) == [f"test_theirs.py::test_softmax[{name}]" for name in ("fast", "naive")]
    assert "MISSING" not in {row["verdict"] for row in rows}
    lines = [json.loads(line) for file in (repository / "out" / "a").glob("*.jsonl") for line in file.open()]
    commit = git(repository, "rev-parse", "HEAD")
    assert {(line["commit"], line["dirty"]) for line in lines} == {(commit, False)}
    done = run("rooflab", "roofline", "a.json", "--gpu", "h100", "--out", "x.svg")
    assert done.returncode == 0 and "2 points" in done.stdout, done.stderr
    page = re.search(r'<g id="patch_1">.*?</g>', (repository / "x.svg").read_text(), re.DOTALL)
    assert page and "#000000" not in page[0], "white, whatever their settings say"


@pytest.mark.more
def test_their_kernel_is_timed_with_their_commit_and_what_cannot_be_is_one_sentence(run, repository, tmp_path):
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", str(shallow))
    shutil.copy(repository / "mine.py", shallow)
    done = run("rooflab", "bench", "--kernel", "mine.py", "--suite", "smoke", "--budget", "0.01", "--out", "out/bench")
    assert done.returncode in (0, 13), done.stderr  # 13 on a busy machine
    lines = [json.loads(line) for file in (repository / "out" / "bench").glob("*.jsonl") for line in file.open()]
    commit = git(repository, "rev-parse", "HEAD")
    assert {(line["commit"], line["dirty"]) for line in lines if line["kernel"] == "mine"} == {(commit, False)}
    for words, sentence in (
        (["ab", "--kernel", "mine.py", "--base", ""], "--base: expected a revision, got ''"),
        (["ab", "--kernel", "mine.py", "--base", "HEAD~1"], "this clone is shallow: .*fetch-depth: 0"),
    ):
        done = run("rooflab", *words, folder=shallow if "HEAD~1" in words else repository)
        assert done.returncode == 2 and re.search(sentence, done.stderr) and "Traceback" not in done.stderr, done.stderr

"""Git revisions as sides: each in a worktree of its own, and in an environment of its own where its pins differ."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.records.environment import git_state
from rooflab.engine.model_files import cache_folder

CONSTRAINTS = "constraints.txt"
"""The file that decides an environment, beside the dependencies in pyproject.toml."""
TIMED = ("torch", "pytorch", "triton", "numpy", "cupy", "cuda", "nvidia", "mkl", "intel-openmp")
"""How the names of packages begin that can change a kernel's time."""
GIT_S = 120.0
INSTALL_S = 3600.0


@dataclass(frozen=True)
class Tree:
    """A checked-out revision."""

    label: str
    path: Path
    commit: str | None
    dirty: bool | None
    python: str = sys.executable


def git(root: Path, *arguments: str, may_fail: bool = False) -> str:
    """What git prints, in English, whatever repository the environment names.

    Raises `ValueError` with git's own words where it fails; where it `may_fail`, they are part of what is returned.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise ValueError(f"git {arguments[0]}: took longer than {GIT_S:.0f} s") from None
    if done.returncode and not may_fail:
        words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ValueError(f"git {arguments[0]}: {words[-1]}")
    return (done.stdout + (done.stderr if may_fail else "")).strip()


def resolve(root: Path, revision: str, what: str = "revision") -> str:
    """The commit that `revision`, which the user calls `what`, names.  Raises `ValueError` where there is none."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except ValueError:
        name = root.resolve().name
        raise ValueError(f"{what}: expected a commit, branch or tag of {name}, got {revision!r}") from None


def working_tree(root: Path) -> Tree:
    """The checkout as it stands, uncommitted changes included."""
    commit, dirty = git_state(root)
    name = f"{commit[:10]}{' and changes' if dirty else ''}" if commit else "no commit"
    return Tree(f"working tree ({name})", root, commit, dirty)


@contextmanager
def checked_out(
    root: Path, revision: str, *, keep_environment: bool = False, done: Callable[[str], None] = lambda text: None
) -> Iterator[Tree]:
    """A worktree of `revision`, gone afterwards; the checkout at `root` is not touched.

    Its interpreter is the running one where both pin the same packages, of those that can change a time, or
    `keep_environment` says so, and else that of a virtual environment which is made for its pins once.  Raises
    `ValueError` where git or pip fail.
    """
    commit = resolve(root, revision)
    with tempfile.TemporaryDirectory(prefix="rooflab-") as folder:
        path = Path(folder) / "tree"
        try:
            git(root, "worktree", "add", "--quiet", "--detach", str(path), commit)
            python = sys.executable if keep_environment or pins(path) == pins(root) else environment(path, done)
            label = revision if commit.startswith(revision) else f"{revision} ({commit[:10]})"
            yield Tree(label, path, commit, False, python)
        finally:
            _remove(root, path)


def _remove(root: Path, path: Path) -> None:
    """Takes a worktree away, or what there is of it; what fails here must not hide what failed before."""
    try:
        git(root, "worktree", "remove", "--force", str(path))
    except ValueError:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(ValueError):
            git(root, "worktree", "prune")


def pins(tree: Path) -> tuple[str, ...]:
    """What a tree asks of the packages that can change a time."""
    return tuple(sorted(line for line in _asked(tree) if re.sub("_", "-", line.lower()).startswith(TIMED)))


def _asked(tree: Path) -> list[str]:
    """All that a tree asks of packages, a line each: its dependencies, those for a GPU, and its pins."""
    declared = _project(tree)
    constraints = tree / CONSTRAINTS
    pinned = constraints.read_text().splitlines() if constraints.is_file() else []
    return [*declared.get("dependencies", []), *_for_a_gpu(declared), *pinned]


def _project(tree: Path) -> dict[str, Any]:
    file = tree / "pyproject.toml"
    found: dict[str, Any] = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    return found


def _for_a_gpu(declared: dict[str, Any]) -> Sequence[str]:
    found: Sequence[str] = declared.get("optional-dependencies", {}).get("cuda", [])
    return found


def environment(tree: Path, done: Callable[[str], None]) -> str:
    """The interpreter of a virtual environment with the pins of `tree`, made at the first use of these pins.

    With a GPU it holds what the tree asks for on one: without NVML a process cannot say which driver and power limit it
    ran with, and nothing it reads can be compared.
    """
    gpu = torch.cuda.is_available()
    name = hashlib.sha256(repr((sys.version_info[:2], gpu, _asked(tree))).encode()).hexdigest()[:16]
    folder = cache_folder() / "environments" / name
    python = folder / "bin" / "python"
    if (folder / "complete").is_file():
        return str(python)
    done("installing the other revision's packages: its pins differ")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "-q"]
    constraints = tree / CONSTRAINTS
    pinned = ["-c", str(constraints)] if constraints.is_file() else []
    # torch first and by itself, so that its pinned build is taken and nothing later asks for another.
    _run([*pip, *pinned, "torch", "triton"])
    declared = _project(tree)
    _run([*pip, *pinned, *declared.get("dependencies", []), *(_for_a_gpu(declared) if gpu else ())])
    (folder / "complete").touch()
    return str(python)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"environment: {' '.join(command[-3:])} took longer than {INSTALL_S:.0f} s") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise ValueError(f"environment: {' '.join(command[-3:])} failed: {words[-1]}")

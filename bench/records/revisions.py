"""Git revisions as sides of an A/B: each has its own worktree, and its own virtual environment if its pins differ."""

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
from rooflab.kernels._folders import cache_folder
from rooflab.reference.spec import CONTRACT

CONSTRAINTS = "constraints.txt"
"""This file and the dependencies in pyproject.toml decide the packages of an environment."""
TIMED = ("torch", "pytorch", "triton", "numpy", "cupy", "cuda", "nvidia", "mkl", "intel-openmp")
"""Prefixes of the names of packages that can change a kernel's time."""
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
    """git's output in English; ignores any repository that environment variables name.

    If git fails, raises `ValueError` with git's message; with `may_fail`, returns the message with the output.
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
    """The commit that `revision` names.  If there is none, raises `ValueError` that calls the revision `what`."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except ValueError:
        name = root.resolve().name
        shallow = git(root, "rev-parse", "--is-shallow-repository", may_fail=True) == "true"
        why = "; this clone is shallow: fetch all of it (actions/checkout: `fetch-depth: 0`)" if shallow else ""
        raise ValueError(f"{what}: expected a commit, branch or tag of {name}, got {revision!r}{why}") from None


def changed_files(root: Path, base: str, head: str | None = None) -> list[str]:
    """Files that differ, as paths from `root`; without `head` those of the working tree, also unknown to
    git."""
    # Without renames: a renamed file is missing from its old op, and git would show only its new name.
    ends = [base, *([head] if head else [])]
    names = git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", *ends).split("\0")
    untracked = [] if head else git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    return [name for name in (*names, *untracked) if name]


def working_tree(root: Path) -> Tree:
    """The checkout in its present state, with uncommitted changes."""
    commit, dirty = git_state(root)
    name = f"{commit[:10]}{' and changes' if dirty else ''}" if commit else "no commit"
    return Tree(f"working tree ({name})", root, commit, dirty)


@contextmanager
def checked_out(
    root: Path, revision: str, *, keep_environment: bool = False, done: Callable[[str], None] = lambda text: None
) -> Iterator[Tree]:
    """Makes a worktree of `revision`, and removes it afterwards; does not touch the checkout at `root`.

    The tree's interpreter is the running one with `keep_environment`, or if both trees pin the same versions of the
    packages that can change a time.  Otherwise it is that of a virtual environment, which is made once for the pins.
    Raises `ValueError` if git or pip fails.
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
    """Removes a worktree, even an incomplete one; an error here must not hide an earlier error."""
    try:
        git(root, "worktree", "remove", "--force", str(path))
    except ValueError:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(ValueError):
            git(root, "worktree", "prune")


def check_contract(tree: Path, label: str, option: str = "base") -> None:
    """Raises `ValueError` where the kernels and specs of `tree` have not the form that this `bench` measures."""
    file = tree / "reference" / "spec.py"
    found = re.search(r"^CONTRACT = (\d+)$", file.read_text() if file.is_file() else "", re.MULTILINE)
    if found is None or int(found[1]) != CONTRACT:
        got = f"contract {found[1]}" if found else "none"
        raise ValueError(
            f"{option}: expected a revision with contract {CONTRACT} in reference/spec.py, got {got} in {label}"
        )


def pins(tree: Path) -> tuple[str, ...]:
    """A tree's requirements for the packages that can change a time."""
    return tuple(sorted(line for line in _asked(tree) if re.sub("_", "-", line.lower()).startswith(TIMED)))


def _asked(tree: Path) -> list[str]:
    """All requirements of a tree, one per line: its dependencies, its dependencies for a GPU, and its pins."""
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
    """The interpreter of a virtual environment with the pins of `tree`, which is made at the first use of these pins.

    On a GPU machine it also holds the tree's GPU packages: without NVML a process cannot tell its driver and power
    limit, and its readings cannot be compared.
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
    # Installs torch and triton first and alone, so that pip takes the pinned build and no package asks for another.
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

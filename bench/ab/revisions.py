"""Git revisions as sides: each in a worktree of its own, and in an environment of its own where its pins differ."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rooflab.bench.environment import git_state
from rooflab.engine.model_files import cache_folder

PINS = ("constraints.txt",)
"""Files that decide an environment, beside the dependencies in pyproject.toml."""
INSTALL_S = 3600.0


@dataclass(frozen=True)
class Tree:
    """A checked-out revision."""

    label: str
    path: Path
    commit: str | None
    dirty: bool | None
    python: str = sys.executable


def git(root: Path, *arguments: str) -> str:
    """What git prints.  Raises `ValueError` with git's own words where it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ValueError(f"git {arguments[0]}: {words[-1]}")
    return done.stdout.strip()


def resolve(root: Path, revision: str) -> str:
    """The commit that `revision` names.  Raises `ValueError` where it names none."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except ValueError:
        raise ValueError(f"revision: expected a commit, branch or tag of {root.name}, got {revision!r}") from None


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

    Its interpreter is the running one where both pin the same packages or `keep_environment` says so, and else that of
    a virtual environment which is made for its pins once.  Raises `ValueError` where git or pip fail.
    """
    commit = resolve(root, revision)
    with tempfile.TemporaryDirectory(prefix="rooflab-") as folder:
        path = Path(folder) / "tree"
        git(root, "worktree", "add", "--quiet", "--detach", str(path), commit)
        try:
            python = sys.executable if keep_environment or pins(path) == pins(root) else environment(path, done)
            label = revision if commit.startswith(revision) else f"{revision} ({commit[:10]})"
            yield Tree(label, path, commit, False, python)
        finally:
            git(root, "worktree", "remove", "--force", str(path))


def pins(tree: Path) -> tuple[object, ...]:
    """What decides the environment of a tree: its dependencies and its pins."""
    project = tree / "pyproject.toml"
    declared = tomllib.loads(project.read_text()).get("project", {}) if project.is_file() else {}
    kept = declared.get("dependencies", []), sorted(declared.get("optional-dependencies", {}).get("cuda", []))
    return (*kept, *((tree / name).read_text() if (tree / name).is_file() else "" for name in PINS))


def environment(tree: Path, done: Callable[[str], None]) -> str:
    """The interpreter of a virtual environment with the pins of `tree`, made at the first use of these pins."""
    name = hashlib.sha256(repr((sys.version_info[:2], pins(tree))).encode()).hexdigest()[:16]
    folder = cache_folder() / "environments" / name
    python = folder / "bin" / "python"
    if (folder / "complete").is_file():
        return str(python)
    done("installing the other revision's packages: its pins differ")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "-q"]
    constraints = tree / "constraints.txt"
    pinned = ["-c", str(constraints)] if constraints.is_file() else []
    # torch first and by itself, so that its pinned build is taken and nothing later asks for another.
    _run([*pip, *pinned, "torch", "triton"])
    declared = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    _run([*pip, *pinned, *declared["dependencies"]])
    (folder / "complete").touch()
    return str(python)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise ValueError(f"environment: {' '.join(command[-3:])} failed: {words[-1]}")

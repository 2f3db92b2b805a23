"""Checks out git revisions for an A/B comparison, in one worktree per side.  Both sides use the same packages."""

from __future__ import annotations

import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooflab.bench.base.git import git, git_says
from rooflab.bench.core import git_state
from rooflab.reference.spec import CONTRACT

CONSTRAINTS_FILE = "constraints.txt"
"""The file that pins packages.  A tree's requirements are these pins and the dependencies in pyproject.toml."""
PACKAGE_PREFIXES = ("torch", "pytorch", "triton", "numpy", "cupy", "cuda", "nvidia", "mkl", "intel-openmp")
"""Prefixes of the names of packages that can change a kernel's time."""


@dataclass(frozen=True)
class Tree:
    """Describes a git revision that is checked out in a folder."""

    label: str
    path: Path
    commit: str | None
    dirty: bool | None


def resolve(root: Path, revision: str) -> str:
    """Returns the commit of a branch, tag or hash.  Raises `ValueError` on an unknown one."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except ValueError:
        name = root.resolve().name
        is_shallow = git(root, "rev-parse", "--is-shallow-repository", may_fail=True) == "true"
        advice = "; this clone is shallow: fetch all of it (actions/checkout: `fetch-depth: 0`)" if is_shallow else ""
        raise ValueError(f"revision: expected a commit, branch or tag of {name}, got {revision!r}{advice}") from None


def changed_files(root: Path, base: str, head: str | None = None) -> list[str]:
    """Returns the files that differ between the revisions `base` and `head`, relative to `root`.  Without `head`,
    compares `base` with the working tree, including untracked files."""
    # Renames count as two files: otherwise git would show only the new name, although the old op lacks the file.
    git_revisions = [base, *([head] if head else [])]
    changed_names = git(root, "diff", "--name-only", "--no-renames", "--relative", "-z", *git_revisions).split("\0")
    untracked_files = [] if head else git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    return [name for name in (*changed_names, *untracked_files) if name]


def working_tree(root: Path) -> Tree:
    """Describes the checkout in its present state, with all uncommitted changes."""
    commit, is_dirty = git_state(root)
    name = f"{commit[:10]}{' and changes' if is_dirty else ''}" if commit else "no commit"
    return Tree(f"working tree ({name})", root, commit, is_dirty)


@contextmanager
def checked_out(root: Path, revision: str) -> Iterator[Tree]:
    """Creates a git worktree of `revision`, removed after the `with` block.  The checkout at `root` does not change.

    Raises `ValueError` if git fails."""
    commit = resolve(root, revision)
    with tempfile.TemporaryDirectory(prefix="rooflab-") as temporary_folder:
        path = Path(temporary_folder) / "tree"
        try:
            git(root, "worktree", "add", "--quiet", "--detach", str(path), commit)
            label = revision if commit.startswith(revision) else f"{revision} ({commit[:10]})"
            yield Tree(label, path, commit, False)
        finally:
            try:
                git(root, "worktree", "remove", "--force", str(path))
            except ValueError:  # an incomplete worktree; an error here must not hide an earlier one
                shutil.rmtree(path, ignore_errors=True)
                git_says(root, "worktree", "prune")


def check_contract(tree: Path, label: str, option: str = "base") -> None:
    """Raises `ValueError` if `tree` has another version of the interface (`CONTRACT`) than the running Rooflab."""
    file = tree / "reference" / "spec.py"
    version_match = re.search(r"^CONTRACT = (\d+)$", file.read_text() if file.is_file() else "", re.MULTILINE)
    if version_match is None or int(version_match[1]) != CONTRACT:
        found_text = f"contract {version_match[1]}" if version_match else "none"
        raise ValueError(
            f"{option}: expected a revision with contract {CONTRACT} in reference/spec.py, got {found_text} in {label}"
        )


def pins(tree: Path) -> tuple[str, ...]:
    """Returns a worktree's requirements for packages that can change a kernel's time, such as torch."""
    project_file, constraints_file = tree / "pyproject.toml", tree / CONSTRAINTS_FILE
    project_table: dict[str, Any] = (
        tomllib.loads(project_file.read_text()).get("project", {}) if project_file.is_file() else {}
    )
    requirements = [
        *project_table.get("dependencies", []),
        *project_table.get("optional-dependencies", {}).get("cuda", []),
    ]
    requirements += constraints_file.read_text().splitlines() if constraints_file.is_file() else []
    return tuple(sorted(line for line in requirements if re.sub("_", "-", line.lower()).startswith(PACKAGE_PREFIXES)))

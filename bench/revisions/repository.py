"""Finds the repository whose revisions are compared: Rooflab's, or another repository that has the kernels.

If it is another repository, only its modules differ between the sides, and both sides use the running Rooflab.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rooflab.bench.base.git import git_says
from rooflab.bench.core import source_of
from rooflab.kernels import registry


def repository_of(files: Sequence[str], checkout: Path) -> Path | None:
    """The repository of `files`, or without files that of the working directory; None if it is Rooflab's `checkout`.

    Raises `ValueError` if there is no repository.
    """
    roots = {_top(Path(file).absolute().parent) for file in files} or {_top(Path.cwd())}
    if len(roots) > 1:
        raise ValueError(f"kernel: expected files of one git repository, got {', '.join(files)}")
    root = roots.pop()
    if not files and root in (None, _top(checkout)) and git_says(checkout, "ls-files", "kernels/registry.py"):
        return None
    if root is None:
        what = f"kernel: expected a file in a git repository, got {files[0]!r}" if files else ""
        raise ValueError(what or f"revision: expected to be in a git repository, got {str(Path.cwd())!r}")
    return root


def _top(folder: Path) -> Path | None:
    top = git_says(folder, "rev-parse", "--show-toplevel")
    return Path(top).resolve() if top else None


def files_in(trees: Sequence[Path], root: Path, files: Sequence[str]) -> list[tuple[Path, ...]]:
    """For each tree, the paths of `files` in the tree.  Each tree is a revision of the repository `root`.

    Raises `ValueError` on a file that no tree has.
    """
    places = (Path(file).absolute() for file in files)
    names = [(place.parent.resolve() / place.name).relative_to(root) for place in places]
    lacking = [str(name) for name in names if not any((tree / name).is_file() for tree in trees)]
    if lacking:
        raise ValueError(f"kernel: expected a file of one of the two revisions, got {lacking[0]!r}")
    return [tuple(tree / name for name in names) for tree in trees]


def import_roots(root: Path) -> list[Path]:
    """The folders from which a repository's modules are imported, as paths from its root: the root, `src`, and folders
    of the repository in Python's path (an editable installation adds such folders)."""
    entries = [Path(entry).resolve() for entry in sys.path if not entry.endswith("-packages")]
    return list(dict.fromkeys((Path(), Path("src"), *(p.relative_to(root) for p in entries if p.is_relative_to(root)))))


def import_path(root: Path, tree: Path) -> str:
    """The PYTHONPATH of a process that imports the repository's modules from `tree`, and not from an installation."""
    first = [str(tree / folder) for folder in import_roots(root)]
    return os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])


@cache
def kernels_in(tree: Path, files: tuple[Path, ...] = ()) -> dict[str, str]:
    """For each kernel id, the kernel's file as a path from `tree`.  With `files`, only kernels that `files` register;
    without `files`, all kernels whose code is in the tree."""
    if files:
        there = [file for file in files if file.is_file()]
        return {kernel.id: str(file.relative_to(tree)) for file in there for kernel in registry.load_file(file)}
    every = [kernel for op in registry.ops() for kernel in registry.kernels(op).values()]
    places, root = {kernel.id: source_of(kernel) for kernel in every}, tree.resolve()
    ours = Path(registry.__file__).resolve().parent  # an environment may lie in the repository
    in_tree = {name: at for name, at in places.items() if at.is_relative_to(root) and not at.is_relative_to(ours)}
    return {name: str(at.relative_to(root)) for name, at in in_tree.items()}

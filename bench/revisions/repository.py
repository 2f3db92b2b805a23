"""Finds the git repository of an A/B comparison.  It is Rooflab's own repository, or another repository with kernels.

In another repository, only its own modules differ between the two sides.  Both sides use the running Rooflab.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rooflab.bench.base.git import git_says, top_of
from rooflab.bench.core import source_of
from rooflab.kernels import registry


def repository_of(files: Sequence[str], checkout: Path) -> Path | None:
    """Returns the git repository that contains `files`.  Without `files`, returns the repository of the working
    directory. Returns None for Rooflab's own `checkout`.

    Raises `ValueError` if there is no repository."""
    repository_roots = {top_of(Path(file).absolute().parent) for file in files} or {top_of(Path.cwd())}
    if len(repository_roots) > 1:
        raise ValueError(f"kernel: expected files of one git repository, got {', '.join(files)}")
    root = repository_roots.pop()
    if not files and root in (None, top_of(checkout)) and git_says(checkout, "ls-files", "kernels/registry.py"):
        return None
    if root is None:
        kernel_message = f"kernel: expected a file in a git repository, got {files[0]!r}" if files else ""
        raise ValueError(kernel_message or f"revision: expected to be in a git repository, got {str(Path.cwd())!r}")
    return root


def files_in(trees: Sequence[Path], root: Path, files: Sequence[str]) -> list[tuple[Path, ...]]:
    """Returns the paths of `files` in each worktree.  Each worktree holds one revision of the repository `root`.

    Raises `ValueError` on a file that is in none of the worktrees."""
    paths = (Path(file).absolute() for file in files)
    relative_paths = [(path.parent.resolve() / path.name).relative_to(root) for path in paths]
    missing_files = [str(name) for name in relative_paths if not any((tree / name).is_file() for tree in trees)]
    if missing_files:
        raise ValueError(f"kernel: expected a file of one of the two revisions, got {missing_files[0]!r}")
    return [tuple(tree / name for name in relative_paths) for tree in trees]


def import_roots(root: Path) -> list[Path]:
    """Returns the folders from which Python imports the repository's modules, relative to its root.  These are the
    root, `src`, and folders of the repository in Python's path (an editable installation adds some)."""
    folders = [Path(import_path).resolve() for import_path in sys.path if not import_path.endswith("-packages")]
    return list(dict.fromkeys((Path(), Path("src"), *(p.relative_to(root) for p in folders if p.is_relative_to(root)))))


def import_path(root: Path, tree: Path) -> str:
    """Returns a PYTHONPATH with which Python imports the repository's modules from the worktree `tree`."""
    repository_paths = [str(tree / folder) for folder in import_roots(root)]
    return os.pathsep.join([*repository_paths, *filter(None, [os.environ.get("PYTHONPATH")])])


@cache
def kernels_in(tree: Path, files: tuple[Path, ...] = ()) -> dict[str, str]:
    """Returns the source file of each kernel, by kernel id, relative to `tree`.  With `files`, returns only the kernels
    that these files register.  Without `files`, returns all kernels with a source file in `tree`."""
    if files:
        found_files = [file for file in files if file.is_file()]
        return {kernel.id: str(file.relative_to(tree)) for file in found_files for kernel in registry.load_file(file)}
    all_kernels = [kernel for op in registry.ops() for kernel in registry.kernels(op).values()]
    paths, root = {kernel.id: source_of(kernel) for kernel in all_kernels}, tree.resolve()
    rooflab_folder = Path(registry.__file__).resolve().parent  # an environment may lie in the repository
    file_by_kernel = {
        name: src for name, src in paths.items() if src.is_relative_to(root) and not src.is_relative_to(rooflab_folder)
    }
    return {name: str(src.relative_to(root)) for name, src in file_by_kernel.items()}

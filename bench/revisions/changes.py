"""Finds the ops and the kernel files that a change between two git revisions affects."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path, PurePosixPath

import networkx as nx

from rooflab.bench.base.git import git
from rooflab.bench.revisions.repository import import_roots

OP_CODE_FOLDERS = ("kernels", "reference", "roofline")
SETTING_FILES = ("pyproject.toml", "constraints.txt")
TIMING_FILES = (
    "bench/ab/ab_worker.py",
    "bench/core/call.py",
    "bench/core/measure.py",
    "bench/core/timed.py",
    "bench/core/boot.py",
    "bench/core/noise.py",
    "bench/core/timers/",
)
"""Prefixes of the paths of files in `bench` that can change a reading."""


def touched_ops(
    changed: Iterable[str], ops: Sequence[str], users: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Returns the members of `ops` that the changed files affect, in the order of `ops`.

    `changed` has paths relative to the checkout.  A file in an op's folder, or the op's reference, affects the op and
    the ops that use it (`users`).  Shared kernel code, timing code of `bench` and pinned packages affect all ops."""
    affected_ops: set[str] = set()
    for file_path in changed:
        folder_parts = PurePosixPath(file_path).parts
        if folder_parts[0] in OP_CODE_FOLDERS:
            is_nested = folder_parts[0] == "kernels" and len(folder_parts) > 2
            name = folder_parts[1] if is_nested else PurePosixPath(file_path).stem
            # It lies in the folder of an op that neither side has.  `kernels/lib` is code that ops share.
            unknown_op = is_nested and name != "lib" and not name.startswith("_")
            if name in ops and folder_parts[0] != "roofline":
                affected_ops |= {name, *(users or {}).get(name, ())}
            elif not unknown_op and not file_path.endswith((".md", ".txt")) and folder_parts[-1] != "plot.py":
                return list(ops)
        elif file_path in SETTING_FILES or file_path.startswith(TIMING_FILES):
            return list(ops)
    return [op for op in ops if op in affected_ops]


def users(trees: Iterable[Path], ops: Collection[str]) -> dict[str, set[str]]:
    """Returns, for each op, the ops that use it.  An op uses another op if it imports its files, also indirectly."""
    uses = nx.DiGraph()
    for tree, op in product(trees, ops):
        for file in (tree / "reference" / f"{op}.py", *sorted((tree / "kernels" / op).glob("*.py"))):
            uses.add_edges_from((used_op, op) for used_op in _ops_imported(file, ops))
    return {op: nx.descendants(uses, op) if op in uses else set() for op in ops}


def _ops_imported(file: Path, ops: Collection[str]) -> Iterator[str]:
    for name in _imported(ast.parse(file.read_text())) if file.is_file() else ():
        package_name, *path = name.split(".")
        if package_name == "rooflab" and path[:1] in (["reference"], ["kernels"]) and path[1:] and path[1] in ops:
            yield path[1]


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yields the names of all modules that a source file imports, also inside functions."""
    for ast_node in ast.walk(tree):
        if isinstance(ast_node, ast.Import):
            yield from (alias_node.name for alias_node in ast_node.names)
        elif isinstance(ast_node, ast.ImportFrom):  # a relative import may have no module
            module_names = [ast_node.module] if ast_node.module else []
            yield from (*module_names, *(".".join([*module_names, alias_node.name]) for alias_node in ast_node.names))


def touched_files(changed: Collection[str], files: Iterable[str], trees: Iterable[Path], root: Path) -> set[str]:
    """Returns the kernel files in `files` that a change affects. All paths are relative to the root `root`.

    A change affects a kernel if it touches its file or a Python file that this imports, also indirectly. A data file
    counts too, if git tracks it in or below these files' folders. Changed pinned packages affect all kernels."""
    affected_files, files = set[str](), {*files}
    if {*changed} & {*SETTING_FILES}:
        return files
    for tree in trees:
        git_files, folders = {*git(tree, "ls-files", "-z").split("\0")}, [tree / name for name in import_roots(root)]
        data_files = {name for name in changed if name in git_files and name[0] != "."}
        data_files = {name for name in data_files if not name.endswith((".py", ".md", ".rst", ".txt"))}
        for file in files:
            used_files = {path.relative_to(tree) for path in _reached(tree / file, tree, folders)}
            has_data_change = any(path.parent in Path(name).parents for path in used_files for name in data_files)
            if has_data_change or {*map(Path, changed)} & used_files:
                affected_files.add(file)
    return affected_files


def _reached(file: Path, tree: Path, folders: Sequence[Path]) -> set[Path]:
    """Returns `file` and all files that it imports, also through other files, including imports inside functions."""
    visited_files: set[Path] = set()
    stack = [file]
    while stack:
        file = stack.pop()
        if file in visited_files or not file.is_file():
            continue
        visited_files.add(file)
        parents = [folder for folder in file.parents if folder.is_relative_to(tree)]  # the folders of a relative import
        with suppress(SyntaxError, ValueError):  # a file that cannot be parsed imports nothing
            for name in _imported(ast.parse(file.read_bytes())):
                for module in (folder.joinpath(*name.split(".")) for folder in (*folders, *parents)):
                    packages = (package / "__init__.py" for package in (module, *module.parents) if package != tree)
                    stack += [module.with_suffix(".py"), *(init for init in packages if init.is_relative_to(tree))]
    return visited_files

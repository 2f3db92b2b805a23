"""Finds the ops and the kernel files that a change between two git revisions affects."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from rooflab.bench.base.git import git
from rooflab.bench.revisions.repository import import_roots

MEASURED_FOLDERS = ("kernels", "reference", "roofline")
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

    `changed` has paths relative to the checkout.  A file in an op's folder, or the op's reference, affects this op and
    the ops that use it (`users`).  Shared code of kernels, timing code of `bench` and the pinned packages affect all
    ops."""
    affected_ops: set[str] = set()
    for file_path in changed:
        folder_parts = PurePosixPath(file_path).parts
        if folder_parts[0] in MEASURED_FOLDERS:
            in_op_dir = folder_parts[0] == "kernels" and len(folder_parts) > 2
            name = folder_parts[1] if in_op_dir else PurePosixPath(file_path).stem
            unknown_op = in_op_dir and not name.startswith("_")  # it lies in the folder of an op that neither side has
            if name in ops and folder_parts[0] != "roofline":
                affected_ops |= {name, *(users or {}).get(name, ())}
            elif not unknown_op and not file_path.endswith((".md", ".txt")) and folder_parts[-1] != "plot.py":
                return list(ops)
        elif file_path in SETTING_FILES or file_path.startswith(TIMING_FILES):
            return list(ops)
    return [op for op in ops if op in affected_ops]


def users(trees: Iterable[Path], ops: Collection[str]) -> dict[str, set[str]]:
    """Returns, for each op, the ops that use it.  An op uses another op if it imports its files, also indirectly."""
    users_by_op: dict[str, set[str]] = {op: set() for op in ops}
    for tree in trees:
        for op in ops:
            for file in (tree / "reference" / f"{op}.py", *sorted((tree / "kernels" / op).glob("*.py"))):
                for used_op in _ops_imported(file, users_by_op):
                    users_by_op[used_op].add(op)
    for between_op in ops:  # Warshall's algorithm for a transitive closure
        for op in ops:
            if between_op in users_by_op[op]:
                users_by_op[op] |= users_by_op[between_op]
    return users_by_op


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

    A change affects a kernel if it touches the kernel's file or a Python file that this file imports, also indirectly.
    A changed data file counts too, if git tracks it in or below a folder of these Python files. A change of the pinned
    packages affects all kernels."""
    affected_files, files = set[str](), {*files}
    if {*changed} & {*SETTING_FILES}:
        return files
    for tree in trees:
        git_files, folders = {*git(tree, "ls-files", "-z").split("\0")}, [tree / name for name in import_roots(root)]
        data_files = {name for name in changed if name in git_files and name[0] != "."}
        data_files = {name for name in data_files if not name.endswith((".py", ".md", ".rst", ".txt"))}
        for file in files:
            reached_files = {path.relative_to(tree) for path in _reached(tree / file, tree, folders)}
            data_file_changed = any(path.parent in Path(name).parents for path in reached_files for name in data_files)
            if data_file_changed or {*map(Path, changed)} & reached_files:
                affected_files.add(file)
    return affected_files


def _reached(file: Path, tree: Path, folders: Sequence[Path]) -> set[Path]:
    """Returns `file` and all files that it imports, directly or through other files. Includes imports inside
    functions."""
    reached_files: set[Path] = set()
    todo_files = [file]
    while todo_files:
        file = todo_files.pop()
        if file in reached_files or not file.is_file():
            continue
        reached_files.add(file)
        parents = [folder for folder in file.parents if folder.is_relative_to(tree)]  # the folders of a relative import
        with suppress(SyntaxError, ValueError):  # a file that cannot be parsed imports nothing
            for name in _imported(ast.parse(file.read_bytes())):
                for module in (folder.joinpath(*name.split(".")) for folder in (*folders, *parents)):
                    packages = (package / "__init__.py" for package in (module, *module.parents) if package != tree)
                    todo_files += [module.with_suffix(".py"), *(init for init in packages if init.is_relative_to(tree))]
    return reached_files

"""Finds the ops and the kernel files that a change between two revisions affects."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from rooflab.bench.base.git import git
from rooflab.bench.revisions.repository import import_roots

MEASURED = ("kernels", "reference", "roofline")
SETTINGS = ("pyproject.toml", "constraints.txt")
DECIDES = (
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
    """Returns the members of `ops` that the changed files affect, in the order of `ops`.  `changed` has paths relative
    to the root of the checkout.

    A file in an op's folder, or the op's reference, affects this op and the ops that use it (`users`).  All ops are
    affected by any other file of `kernels`, `reference` or `roofline`, and by the pinned packages.  All ops are also
    affected by files that can change a measured time (`DECIDES`).  Documents, tests, results and the engine affect no
    op."""
    touched: set[str] = set()
    for text in changed:
        parts = PurePosixPath(text).parts
        if parts[0] in MEASURED:
            in_folder = parts[0] == "kernels" and len(parts) > 2
            name = parts[1] if in_folder else PurePosixPath(text).stem
            unused = in_folder and not name.startswith("_")  # it lies in the folder of an op that neither side has
            if name in ops and parts[0] != "roofline":
                touched |= {name, *(users or {}).get(name, ())}
            elif not unused and not text.endswith((".md", ".txt")) and parts[-1] != "plot.py":
                return list(ops)
        elif text in SETTINGS or text.startswith(DECIDES):
            return list(ops)
    return [op for op in ops if op in touched]


def users(trees: Iterable[Path], ops: Collection[str]) -> dict[str, set[str]]:
    """Returns, for each op, the ops that use it: their code imports the op's files, directly or indirectly."""
    users_of: dict[str, set[str]] = {op: set() for op in ops}
    for tree in trees:
        for op in ops:
            for file in (tree / "reference" / f"{op}.py", *sorted((tree / "kernels" / op).glob("*.py"))):
                for used_op in _ops_imported(file, users_of):
                    users_of[used_op].add(op)
    for through in ops:  # Warshall's algorithm for a transitive closure
        for op in ops:
            if through in users_of[op]:
                users_of[op] |= users_of[through]
    return users_of


def _ops_imported(file: Path, ops: Collection[str]) -> Iterator[str]:
    for name in _imported(ast.parse(file.read_text())) if file.is_file() else ():
        first, *parts = name.split(".")
        if first == "rooflab" and parts[:1] in (["reference"], ["kernels"]) and parts[1:] and parts[1] in ops:
            yield parts[1]


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yields the imported modules.  Imports inside functions count, because a function imports its timer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):  # a relative import may have no module
            module_names = [node.module] if node.module else []
            yield from (*module_names, *(".".join([*module_names, alias.name]) for alias in node.names))


def touched_files(changed: Collection[str], files: Iterable[str], trees: Iterable[Path], root: Path) -> set[str]:
    """Returns the members of `files` that a change affects.  `files` are kernel files in the repository `root`.  All
    paths are relative to `root`.

    Three kinds of changes affect a kernel file.  The first kind is a change of a Python file that the kernel imports,
    directly or through other files.  The second kind is a change of another tracked file beside or below the imported
    files, except documents and hidden files.  The third kind is a change of the pinned packages."""
    touched, files = set[str](), {*files}
    if {*changed} & {*SETTINGS}:
        return files
    for tree in trees:
        tracked, folders = {*git(tree, "ls-files", "-z").split("\0")}, [tree / name for name in import_roots(root)]
        data = {name for name in changed if name in tracked and name[0] != "."}
        data = {name for name in data if not name.endswith((".py", ".md", ".rst", ".txt"))}
        for file in files:
            reached = {path.relative_to(tree) for path in _reached(tree / file, tree, folders)}
            data_changed = any(path.parent in Path(name).parents for path in reached for name in data)
            if data_changed or {*map(Path, changed)} & reached:
                touched.add(file)
    return touched


def _reached(file: Path, tree: Path, folders: Sequence[Path]) -> set[Path]:
    """Returns `file` and all files that it imports, directly or indirectly, also inside functions."""
    reached: set[Path] = set()
    waiting = [file]
    while waiting:
        file = waiting.pop()
        if file in reached or not file.is_file():
            continue
        reached.add(file)
        parents = [folder for folder in file.parents if folder.is_relative_to(tree)]  # the folders of a relative import
        with suppress(SyntaxError, ValueError):  # a file that cannot be parsed imports nothing
            for name in _imported(ast.parse(file.read_bytes())):
                for module in (folder.joinpath(*name.split(".")) for folder in (*folders, *parents)):
                    packages = (parent / "__init__.py" for parent in (module, *module.parents) if parent != tree)
                    waiting += [module.with_suffix(".py"), *(init for init in packages if init.is_relative_to(tree))]
    return reached

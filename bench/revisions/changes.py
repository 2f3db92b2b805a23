"""Finds the ops and the kernels' files that a change between two revisions affects."""

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
    """The members of `ops` that the changed files (paths from the checkout's root) affect, in the order of `ops`.

    A file in an op's folder, or the op's reference, affects the op and its `users`.  All ops are affected by any other
    file of `kernels`, `reference` or `roofline`, by the pinned packages, and by files that can change a reading
    (`DECIDES`).  Documents, tests, results and the engine affect no op.
    """
    touched: set[str] = set()
    for text in changed:
        parts = PurePosixPath(text).parts
        if parts[0] in MEASURED:
            in_folder = parts[0] == "kernels" and len(parts) > 2
            named = parts[1] if in_folder else PurePosixPath(text).stem
            unused = in_folder and not named.startswith("_")  # it lies in the folder of an op that neither side has
            if named in ops and parts[0] != "roofline":
                touched |= {named, *(users or {}).get(named, ())}
            elif not unused and not text.endswith((".md", ".txt")) and parts[-1] != "plot.py":
                return list(ops)
        elif text in SETTINGS or text.startswith(DECIDES):
            return list(ops)
    return [op for op in ops if op in touched]


def users(trees: Iterable[Path], ops: Collection[str]) -> dict[str, set[str]]:
    """For each op, the ops that use it: their reference or kernels import its files in a tree, also through others."""
    users_of: dict[str, set[str]] = {op: set() for op in ops}
    for tree in trees:
        for op in ops:
            for file in (tree / "reference" / f"{op}.py", *sorted((tree / "kernels" / op).glob("*.py"))):
                for used in _ops_imported(file, users_of):
                    users_of[used].add(op)
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
    """The modules that a file imports, also inside functions, because a function imports the timer of its device."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):  # a relative import may have no module
            named = [node.module] if node.module else []
            yield from (*named, *(".".join([*named, alias.name]) for alias in node.names))


def touched_files(changed: Collection[str], files: Iterable[str], trees: Iterable[Path], root: Path) -> set[str]:
    """The members of `files` (kernels' files in the repository `root`) that a change affects, as paths from `root`.

    A kernel's file is affected by changes of Python files that it imports in a tree, also through other files; of other
    files that git knows beside or below those, except documents and hidden files; and of the pinned packages.
    """
    touched, files = set[str](), {*files}
    if {*changed} & {*SETTINGS}:
        return files
    for tree in trees:
        tracked, folders = {*git(tree, "ls-files", "-z").split("\0")}, [tree / name for name in import_roots(root)]
        data = {name for name in changed if name in tracked and name[0] != "."}
        data = {name for name in data if not name.endswith((".py", ".md", ".rst", ".txt"))}
        for file in files:
            reached = {place.relative_to(tree) for place in _reached(tree / file, tree, folders)}
            beside = any(place.parent in Path(name).parents for place in reached for name in data)
            if beside or {*map(Path, changed)} & reached:
                touched.add(file)
    return touched


def _reached(file: Path, tree: Path, folders: Sequence[Path]) -> set[Path]:
    """`file` and all files of a tree that `file` imports, also inside functions and through other files."""
    reached: set[Path] = set()
    waiting = [file]
    while waiting:
        file = waiting.pop()
        if file in reached or not file.is_file():
            continue
        reached.add(file)
        beside = [folder for folder in file.parents if folder.is_relative_to(tree)]  # the folders of a relative import
        with suppress(SyntaxError, ValueError):  # a file that cannot be parsed imports nothing
            for name in _imported(ast.parse(file.read_bytes())):
                for place in (folder.joinpath(*name.split(".")) for folder in (*folders, *beside)):
                    packages = (parent / "__init__.py" for parent in (place, *place.parents) if parent != tree)
                    waiting += [place.with_suffix(".py"), *(init for init in packages if init.is_relative_to(tree))]
    return reached

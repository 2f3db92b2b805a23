"""The files of `bench` that decide a reading: the measuring process and what it imports, at whatever place.

Where they are the same in two revisions, each side is measured by its own `bench`, which fits its own kernels and
specs. Where they differ, the running program's `bench` measures both, or the change of the timer would pass for a
change of the kernels.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

START = "rooflab.bench.ab.worker"
TIMES_NOTHING = (
    "rooflab.bench.ab",
    "rooflab.bench.ab.adhoc",
    "rooflab.bench.ab.largest",
    "rooflab.bench.check.check",
    "rooflab.bench.show",
)
"""What the process imports beside what times: `compare`, functions without a spec, what there is, the check, tables."""


def harness(tree: Path) -> dict[str, str]:
    """SHA-256 by path below `tree`; empty for a tree that has no A/B."""
    found: dict[str, str] = {}
    waiting = [START]
    while waiting:
        file = _file(tree, waiting.pop())
        if file is None or str(file.relative_to(tree)) in found:
            continue
        text = file.read_bytes()
        found[str(file.relative_to(tree))] = hashlib.sha256(text).hexdigest()
        waiting.extend(name for name in _imported(ast.parse(text)) if name not in TIMES_NOTHING)
    return found


def _file(tree: Path, module: str) -> Path | None:
    parts = module.split(".")[1:]
    if not parts or parts[0] != "bench":
        return None
    places = (tree.joinpath(*parts).with_suffix(".py"), tree.joinpath(*parts, "__init__.py"))
    return next((place for place in places if place.is_file()), None)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Modules imported anywhere in a file: a function imports the stopwatch of its device."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

"""Finds the tests that reach a planted fault: they ran the changed statement, or, for device code, use its rungs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tracing import LAYERS, SHARED

Fault = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef
QUICK_S = 0.5
"""The seconds below which tests run first, in the order of their files; the others follow, the quickest first."""


class Reaching:
    """The data that `coverage` kept in a folder."""

    def __init__(self, folder: Path, tree: Path):
        self.tree = tree
        self.seconds: dict[str, dict[str, float]] = {"test": {}, "more": {}}
        for line in (folder / "tests.jsonl").read_text().splitlines():
            row = json.loads(line)
            self.seconds[row["set"]] |= row["seconds"]
        self.sets = [which for which, seconds in self.seconds.items() if seconds]
        """The sets whose tests are known."""
        self._all = {name for seconds in self.seconds.values() for name in seconds}
        self._by_file: dict[str, set[str]] = {}
        for name in self._all:
            self._by_file.setdefault(name.partition("::")[0], set()).add(name)
        self._data = import_module("coverage").CoverageData(str(folder / "lines"))
        self._data.read()
        self._lines: dict[str, dict[int, set[str]]] = {}

    def tests(self, fault: Fault) -> tuple[set[str], set[str]]:
        """Tests that ran the change; for Python also the other tests of their files, which may share what one makes."""
        name = fault["file"]
        text = (self.tree / name).read_text()
        lines = changed_lines(text, fault)
        if "tests" in fault:
            near = {test for test in self._all if re.search(fault["tests"], test)}
        elif is_device(name, text, lines):
            return self._of_rungs(name), set()
        else:
            near = self._of_python(name, text, lines)
        beside = {test for file in {test.partition("::")[0] for test in near} for test in self._by_file[file]}
        return near, beside - near

    def ordered(self, tests: Iterable[str], which: str) -> list[str]:
        """The tests of a set, in the order in which they run."""
        own = self.seconds[which]
        return sorted(own.keys() & set(tests), key=lambda name: (own[name] if own[name] >= QUICK_S else 0.0, name))

    def _of_file(self, name: str) -> dict[int, set[str]]:
        """By line, the tests that ran the line."""
        if name not in self._lines:
            found: dict[int, set[str]] = {}
            for line, contexts in self._data.contexts_by_lineno(str(self.tree / name)).items():
                tests = found.setdefault(line, set())
                for context in contexts:
                    shared = context.endswith(SHARED)
                    tests |= self._by_file.get(context.partition("::")[0], set()) if shared else {context} & self._all
            self._lines[name] = found
        return self._lines[name]

    def _of_functions(self, name: str) -> set[str]:
        """The tests that ran a line inside a function of the file; other lines run when it is imported."""
        tree, reached = ast.parse((self.tree / name).read_text()), self._of_file(name)
        lines = {line for node in ast.walk(tree) if isinstance(node, Function) for line in _body(node)}
        return {test for line in lines for test in reached.get(line, ())}

    def _of_rungs(self, name: str) -> set[str]:
        """Tests that run a function of a rung's launcher, name the rung or its op alone, or lie in its op's files."""
        ops = {folder.name for folder in (self.tree / "kernels").iterdir() if folder.is_dir()}
        found = {test for test in self._all if f"/test_{Path(name).stem}" in test}
        for rung in rungs_of(self.tree, name):
            op = rung.partition("/")[0]
            if (self.tree / "kernels" / f"{rung}.py").exists():
                found |= self._of_functions(f"kernels/{rung}.py")
            own = re.compile(rf"\b{re.escape(rung)}\b|\b{op}(?![\w/])")
            for test in self._all:
                stem = Path(test.partition("::")[0]).stem.removeprefix("test_")
                nearest = max((one for one in ops if f"{stem}_".startswith(f"{one}_")), key=len, default="")
                if nearest == op or own.search(test):
                    found.add(test)
        return found

    def _of_python(self, name: str, text: str, lines: range) -> set[str]:
        tree, reached = ast.parse(text), self._of_file(name)
        owners = [node for node in ast.walk(tree) if isinstance(node, Function)]
        found: set[str] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.stmt) or not set(_head(node)) & set(lines):
                continue
            if isinstance(node, Function):  # the line is a default value or a decorator
                found |= {test for line in _body(node) for test in reached.get(line, ())}
            elif any(node.lineno in _body(owner) for owner in owners):
                found |= {test for line in _head(node) for test in reached.get(line, ())}
            else:  # the line ran at import: take all tests of the file and of its importers
                for other in (name, *importers(self.tree, name)):
                    found |= self._of_functions(other)
        return found


def changed_lines(text: str, fault: Fault) -> range:
    """The numbers of the lines of `old` that `new` changes; if lines are only dropped, also the line before them."""
    before, after = fault["old"].splitlines(), fault["new"].splitlines()
    head = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    tail = 0
    while tail < min(len(before), len(after)) - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    first = text[: text.index(fault["old"])].count("\n") + 1
    return range(first + min(head, len(before) - 1), first + max(len(before) - tail, head + 1))


def is_device(name: str, text: str, lines: range) -> bool:
    """Whether the lines are C++, CUDA C++ or a function that Triton or Gluon compiles."""
    if not name.endswith(".py"):
        return True
    jitted = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Function) and any("jit" in ast.unparse(one) for one in node.decorator_list)
    ]
    return any(lines.start in range(node.lineno, (node.end_lineno or 0) + 1) for node in jitted)


def _body(node: Any) -> range:
    return range(node.body[0].lineno, node.end_lineno + 1)


def _head(node: Any) -> range:
    """The lines of a statement, without the statements inside it."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    inner = getattr(node, "body", None)
    return range(first, max(inner[0].lineno, first + 1) if inner else node.end_lineno + 1)


@cache
def importers(tree: Path, name: str) -> list[str]:
    """The files of the layers that import the file `name` by its name."""
    module = "rooflab." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, stem = module.rpartition(".")
    pattern = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{stem}\b")
    files = [file for layer in LAYERS for file in (tree / layer).rglob("*.py")]
    return [file.relative_to(tree).as_posix() for file in files if pattern.search(file.read_text())]


@cache
def rungs_of(tree: Path, name: str) -> frozenset[str]:
    """The rungs that use a source file: the file's own rung, or the rungs that include it, also through others."""
    sources = [file for file in sorted((tree / "kernels").rglob("*")) if file.suffix in (".py", ".cu", ".h", ".cpp")]
    names = {file: file.relative_to(tree).as_posix() for file in sources}
    # Files directly in kernels/ are launching code, except the headers of the C++ kernels.
    texts = {name: file.read_text() for file, name in names.items() if name.count("/") > 1 or file.suffix == ".h"}
    left, seen, found = [name], {name}, set[str]()
    while left:
        path = Path(left.pop())
        if len(path.parts) == 3 and path.parts[1] != "lib" and not path.stem.startswith("_"):
            found.add(f"{path.parts[1]}/{path.stem}")
            continue
        stem = re.escape(path.stem)
        where = r"lib[./]|\blib import (?:[^\n]*\b)?" if path.parts[1] == "lib" else r"[./]|\bimport (?:[^\n]*\b)?"
        pattern = re.compile(rf"(?:{where}){stem}\b|\"{stem}\.\w+\"")
        users = [other for other, text in texts.items() if other not in seen and pattern.search(text)]
        left, seen = left + users, {*seen, *users}
    return frozenset(found)

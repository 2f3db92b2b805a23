"""A hash over everything of ours that a kernel's compiled code can depend on, by reading imports, importing nothing."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

LAYERS = ("kernels", "reference", "roofline")
"""What a kernel may import of ours (the house rule of one-way imports)."""
_CHOICES = "choices.json"


class Sources:
    """The files of one tree."""

    def __init__(self, layers: Mapping[str, Path]):
        self.layers = dict(layers)
        self._imports: dict[Path, tuple[Path, ...]] = {}
        self._hashes: dict[Path, str] = {}
        self._data: list[Path] | None = None

    @classmethod
    def at(cls, tree: Path) -> Sources:
        """Those of a checkout."""
        return cls({layer: tree / layer for layer in LAYERS})

    def of(self, module: str, op: str) -> str | None:
        """The hash for a kernel of `op` whose launcher is in `module`; None where one of them is not in the tree, and
        what it reads is not known.

        It covers the module, the op's definition, all that they import of ours, however far, every file of the op's
        folder, and every file under `kernels/` that is not Python: sources of CUDA C++ and their headers.
        """
        starts = [self._file(module), self._file(f"rooflab.reference.{op}")]
        folder = self.layers["kernels"] / op
        if None in starts or not module.startswith("rooflab.kernels.") or not folder.is_dir():
            return None
        files = {file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
        waiting = [*(file for file in (*starts, *files) if file is not None and file.suffix == ".py")]
        while waiting:
            file = waiting.pop()
            files.add(file)
            waiting.extend(found for found in self._imported(file) if found not in files)
        files |= set(self._other_data())
        named = sorted((self._name(file), self._hash(file)) for file in files)
        return hashlib.sha256(repr(named).encode()).hexdigest()

    def all(self) -> str:
        """The hash of every file of the tree."""
        found = (file for root in self.layers.values() for file in root.rglob("*") if file.is_file())
        files = [file for file in found if "__pycache__" not in file.parts]
        return hashlib.sha256(repr(sorted((self._name(file), self._hash(file)) for file in files)).encode()).hexdigest()

    def _name(self, file: Path) -> str:
        root = next(root for root in self.layers.values() if root in file.parents)
        return f"{root.name}/{file.relative_to(root)}"

    def _hash(self, file: Path) -> str:
        if file not in self._hashes:
            self._hashes[file] = hashlib.sha256(file.read_bytes()).hexdigest()
        return self._hashes[file]

    def _other_data(self) -> list[Path]:
        if self._data is None:
            found = (file for file in self.layers["kernels"].rglob("*") if file.is_file())
            skipped = (".py", ".pyc")
            self._data = [file for file in found if file.suffix not in skipped and file.name != _CHOICES]
        return self._data

    def _file(self, module: str) -> Path | None:
        """The file of a module of ours; None where there is none."""
        parts = module.split(".")
        if len(parts) < 3 or parts[0] != "rooflab" or parts[1] not in self.layers:
            return None
        path = self.layers[parts[1]].joinpath(*parts[2:])
        return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

    def _imported(self, file: Path) -> tuple[Path, ...]:
        if file not in self._imports:
            package = f"rooflab.{self._name(file)}".removesuffix(".py").replace("/", ".").split(".")[:-1]
            found = []
            for name in _imported_names(ast.parse(file.read_bytes()), package):
                parts = name.split(".")
                # A package's own file is imported with whatever is in it.
                found += [self._file(".".join(parts[:length])) for length in range(3, len(parts) + 1)]
            self._imports[file] = tuple(dict.fromkeys(entry for entry in found if entry is not None))
        return self._imports[file]


def _imported_names(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """Full names of what may be modules, wherever in the file they are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def own_sources() -> Sources:
    """Those of the tree that this process runs."""
    return Sources({layer: Path(next(iter(import_module(f"rooflab.{layer}").__path__))) for layer in LAYERS})

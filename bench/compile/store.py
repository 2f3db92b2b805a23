"""Compiled code on disk, so that `rooflab static` compiles nothing twice.

An entry is named by a hash of everything that it depends on, and is never changed; it appears whole or not at all.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import platform
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton

from rooflab.bench.compile.cases import COMPILED, Query, Selected, module_of, select
from rooflab.bench.records.files import write_whole
from rooflab.engine.model_files import cache_folder
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

CUDA_PACKAGES = ("cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
PREFIXES = ("TRITON_", "PTXAS", "NVCC_", "NVRTC_", "CUDA_", "CUPY_", "LLVM_", "MLIR_", "DISABLE_", "ENABLE_", "USE_")
"""Environment variables that compilers read begin so."""
PLACES = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_VISIBLE_DEVICES", "CUPY_CACHE_DIR")
"""Of these, those that say where files are or which GPU is seen, and change no code."""
UNUSED_S = 30 * 24 * 3600.0
"""An entry that nothing has read for this long is deleted."""
_READERS = (
    "compile/worker.py",
    "compile/capture.py",
    "compile/sass.py",
    "compile/cases.py",
)


class Store:
    """A folder of answers of the compiling processes."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or cache_folder() / "static"
        self.hits = 0
        self.misses = 0

    def key(self, message: Mapping[str, Any], sources: str | None) -> str | None:
        """The name of the entry for a request over sources of this hash; None where the sources are not known."""
        if sources is None:
            return None
        parts = json.dumps([dict(message), sources, _toolchain(), _variables()], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()

    def read(self, key: str) -> dict[str, Any] | None:
        """The entry, or None where there is none or it is damaged."""
        path = self._path(key)
        try:
            entry: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
            if entry["key"] != key:
                raise KeyError("key")
            answer: dict[str, Any] = entry["answer"]
            os.utime(path)
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
            self.misses += 1
            return None
        self.hits += 1
        return answer

    def write(self, key: str, answer: Mapping[str, Any]) -> None:
        """Keeps an answer.  Raises `ValueError` where the folder cannot be written to."""
        content = gzip.compress(json.dumps({"key": key, "answer": answer}).encode(), compresslevel=3)
        try:
            write_whole(self._path(key), content)
        except OSError as error:
            raise ValueError(
                f"ROOFLAB_CACHE: expected a folder that can be written to, got {error}; --no-cache does without"
            ) from error

    def prune(self) -> None:
        """Deletes what nothing has read for a month, and what was never finished."""
        limit = time.time() - UNUSED_S
        for file in self.folder.glob("*"):
            try:
                if file.stat().st_mtime < limit:
                    file.unlink()
            except FileNotFoundError:  # another process was quicker
                continue

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:40]}.json.gz"


def can_keep(backend: str) -> bool:
    """Whether a version says all of what compiles this backend's kernels: CUDA C++ may come from a toolkit outside the
    packages, and that one can change under the same name."""
    return backend != "cuda" or all(_version(package) != "absent" for package in CUDA_PACKAGES)


@cache
def _toolchain() -> list[str]:
    bench = Path(__file__).parent.parent
    readers = [hashlib.sha256((bench / name).read_bytes()).hexdigest() for name in _READERS]
    own = [platform.python_version(), platform.machine(), torch.__version__, triton.__version__]
    return [*own, *map(_version, ("numpy", *CUDA_PACKAGES)), *readers]


def _variables() -> list[tuple[str, str]]:
    return sorted((k, v) for k, v in os.environ.items() if k.startswith(PREFIXES) and k not in PLACES)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


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


def select_kept(query: Query, store: Store | None) -> list[Selected]:
    """`cases.select` of the query; from the store where nothing has changed that it depends on."""
    keeping = Store(store.folder) if store else None  # another count of hits
    key = _selection_key(query, keeping) if keeping else None
    answer = keeping.read(key) if keeping and key else None
    if answer is not None:
        return [_selected(item) for item in answer["selected"]]
    found = select(query.op, query.kernels, query.suites, query.cases, query.schemes, every_case=query.every_case)
    if keeping and key:
        keeping.write(key, {"selected": [item.to_json() for item in found]})
    return found


def _selection_key(query: Query, store: Store) -> str | None:
    """None where a kernel or an op is from outside the tree, whose sources are not known."""
    if any(name.endswith(".py") for name in query.kernels):
        return None
    ops = [query.op] if query.op else list(registry.ops())
    kernels = [kernel for op in ops for kernel in registry.kernels(op).values() if kernel.backend in COMPILED]
    sources = own_sources()
    for kernel in kernels:
        if sources.of(module_of(kernel), kernel.op) is None:
            return None
    message = {"do": "select", **asdict(query), "known": [kernel.id for kernel in kernels]}
    return store.key(message, sources.all())


def _selected(item: dict[str, Any]) -> Selected:
    return Selected(registry.get_kernel(item["op"], item["kernel"]), Case(**item["case"]), get_scheme(item["scheme"]))

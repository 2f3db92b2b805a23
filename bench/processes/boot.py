"""The first file of a process that works with another tree: run by its path, it decides which tree `rooflab` means.

`python -P boot.py TREE HARNESS MODULE` then calls `serve()` of MODULE, which belongs to HARNESS.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

HARNESS = ("bench", "engine")
MEASURED = ("kernels", "reference", "roofline")


class OnlyHere:
    """Finds modules of `rooflab` in the folders of `make_namespace` and nowhere else.

    Without it the finder of an editable installation answers for what one of the trees has not got.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """The module's spec; None for what is not Rooflab's.  Raises `ModuleNotFoundError` on what is not here."""
        if not name.startswith("rooflab."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r} in this tree", name=name)
        return spec


def make_namespace(tree: Path, harness: Path) -> None:
    """`rooflab`: `kernels`, `reference` and `roofline` of `tree`, `bench` and `engine` of `harness`.

    Before anything of it is imported, so that no file of an installed Rooflab or of the other side can be.
    """
    package = types.ModuleType("rooflab")
    package.__path__ = []
    sys.modules["rooflab"] = package
    for folder, root in [*((name, tree) for name in MEASURED), *((name, harness) for name in HARNESS)]:
        module = types.ModuleType(f"rooflab.{folder}")
        module.__path__ = [str(root / folder)]
        sys.modules[f"rooflab.{folder}"] = module
        setattr(package, folder, module)
    sys.meta_path.insert(0, OnlyHere)


if __name__ == "__main__":
    make_namespace(Path(sys.argv[1]), Path(sys.argv[2]))
    import_module(sys.argv[3]).serve()

"""Starts the compiling process with another tree's kernels: `python -P _tree_worker.py FOLDER`, run by its path.

`rooflab` is made here, before anything is imported: `bench` and `engine` are those beside this file, `kernels`,
`reference` and `roofline` those of the folder.  What finds an installed Rooflab by its name is taken out, so that a
module which the folder lacks is missing and is not the installed one.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent.parent
OTHERS = ("kernels", "reference", "roofline")
"""Layers of the other tree; what reads and judges the code is this tree's, for both sides."""


def make_namespace(tree: Path) -> None:
    """Makes the package `rooflab` of five folders."""
    package = types.ModuleType("rooflab")
    package.__path__ = []
    sys.modules["rooflab"] = package
    for layer in (*OTHERS, "engine", "bench"):
        module = types.ModuleType(f"rooflab.{layer}")
        module.__path__ = [str((tree if layer in OTHERS else HERE) / layer)]
        sys.modules[module.__name__] = module
        setattr(package, layer, module)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _finds_by_name(finder)]


def _finds_by_name(finder: object) -> bool:
    """Whether it is one that setuptools installs for an editable package."""
    module = finder.__module__ if isinstance(finder, type) else type(finder).__module__
    return module.startswith("__editable__")


def check_origin(tree: Path) -> None:
    """Raises `RuntimeError` where a loaded module of the tree's layers is from elsewhere."""
    for name, module in list(sys.modules.items()):
        parts = name.split(".")
        if parts[0] == "rooflab" and len(parts) > 2 and parts[1] in OTHERS:
            file = getattr(module, "__file__", None)
            if file is None or tree not in Path(file).parents:
                raise RuntimeError(f"{name} was loaded from {file}, which is not in the other tree")


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    make_namespace(folder)
    from rooflab.bench import _compile_worker
    from rooflab.kernels import registry

    registry.load_all()
    check_origin(folder)
    _compile_worker.main()

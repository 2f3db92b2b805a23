"""Starts the compiling process with another tree's kernels: `python -P _tree_worker.py FOLDER`, run by its path.

`processes/boot.py` makes `rooflab` before anything of it is imported: `bench` and `engine` are those beside this file;
`kernels`, `reference` and `roofline` are those of the folder. What the folder lacks is missing.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
OTHERS = ("kernels", "reference", "roofline")
"""Layers of the other tree; what reads and judges the code is this tree's, for both sides."""


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
    runpy.run_path(str(HERE / "bench" / "processes" / "boot.py"))["make_namespace"](folder, HERE)
    from rooflab.bench.compile import worker
    from rooflab.kernels import registry

    registry.load_all()
    check_origin(folder)
    worker.main()

"""The command line.  A file in this folder holds commands that belong together; no list of them is edited.

Every command that prints a table or a result takes `--json` with the same content.
"""

from importlib import import_module
from pathlib import Path

from rooflab.bench.cli.app import app, run

for _file in sorted(Path(__file__).parent.glob("*.py")):
    if not _file.stem.startswith("_"):
        import_module(f"rooflab.bench.cli.{_file.stem}")

__all__ = ["app", "run"]

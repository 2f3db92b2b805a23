"""The command line.  A file in this folder holds commands that belong together; no list of them is edited.

Every command that prints a table or a result takes `--json` with the same content.  Importing this package registers
every command with the application in `app.py`.
"""

from importlib import import_module
from pathlib import Path

from rooflab.bench.cli.app import Command, app

for _file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"rooflab.bench.cli.{_file.stem}")
for _group in (app, *(group.typer_instance for group in app.registered_groups)):
    for _info in _group.registered_commands if _group else ():
        _info.cls = Command

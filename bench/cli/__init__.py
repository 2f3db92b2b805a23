"""Defines the command line `rooflab`.  Each file here defines related commands; the package imports every file.

Every command that prints a table or a result has an option `--json`, which prints the same content as JSON.  Importing
this package registers every command with the application in `app.py`.
"""

from importlib import import_module
from pathlib import Path

for _command_file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"rooflab.bench.cli.{_command_file.stem}")
_app_module = import_module("rooflab.bench.cli.app")
for _typer_app in (_app_module.app, *(group.typer_instance for group in _app_module.app.registered_groups)):
    for _command in _typer_app.registered_commands:
        if not issubclass(_command.cls, _app_module.Command):
            _command.cls = _app_module.Command

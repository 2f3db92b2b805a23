"""Tells which extra (group of optional dependencies) installs a missing module."""

from __future__ import annotations

from importlib.util import find_spec

MODULES = {
    "engine": ("transformers", "tokenizers", "safetensors", "gguf"),
    "report": ("jinja2",),
    "serve": ("fastapi", "uvicorn", "h11", "uvloop", "zmq", "prometheus_client", "aiohttp"),
    "replicas": ("ray",),
}
"""For each extra, its modules that commands import.  The extras `cuda`, `tracing` and `published` are not listed: only
one file uses each of them, and that file checks for the extra."""


class MissingExtra(ModuleNotFoundError):
    """Reports that a module of an extra is not installed.  The message says how to install the extra."""

    def __init__(self, module: str, extra: str):
        super().__init__(f"{module}: is not installed; pip install 'rooflab[{extra}]'", name=module)


def missing(error: ImportError) -> MissingExtra | None:
    """Converts an import error into a `MissingExtra` that names the extra (group of optional dependencies) to install.
    Returns None if no extra includes the module that failed to import."""
    if isinstance(error, MissingExtra):
        return error
    name = str(error.name).partition(".")[0]
    return next((MissingExtra(name, extra) for extra, modules in MODULES.items() if name in modules), None)


def need(*extras: str) -> None:
    """Raises `MissingExtra` if a module of `extras` is not installed.  Commands call this before they start work."""
    for extra in extras:
        for module in MODULES[extra]:
            if find_spec(module) is None:
                raise MissingExtra(module, extra)

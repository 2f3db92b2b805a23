"""The extras of the package: which extra installs a module that is missing."""

from __future__ import annotations

from importlib.util import find_spec

MODULES = {
    "engine": ("transformers", "tokenizers", "safetensors", "gguf"),
    "report": ("jinja2",),
    "serve": ("fastapi", "uvicorn", "h11", "uvloop", "zmq", "prometheus_client", "aiohttp"),
    "replicas": ("ray",),
}
"""By extra, the modules that commands import from it.  The extras `cuda`, `tracing` and `published` are not here:
each is asked for by the only code that uses it."""


def how_to_install(module: str | None) -> str | None:
    """The sentence that says how to install a module, or None if no extra has the module."""
    extras = (extra for extra, modules in MODULES.items() if str(module).partition(".")[0] in modules)
    return next((f"{module}: is not installed; pip install 'rooflab[{extra}]'" for extra in extras), None)


def need(*extras: str) -> None:
    """Raises `ModuleNotFoundError` where a module of these extras is missing, before a command has begun its work."""
    for module in (module for extra in extras for module in MODULES[extra]):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

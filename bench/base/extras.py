"""The extras of the package: which of them installs a module that is missing."""

from __future__ import annotations

from importlib.util import find_spec

MODULES = {
    "engine": ("transformers", "tokenizers", "safetensors", "gguf"),
    "report": ("jinja2",),
    "serve": ("fastapi", "uvicorn", "h11", "uvloop", "zmq", "prometheus_client", "aiohttp"),
    "replicas": ("ray",),
}
"""By extra the modules that commands import of it. Beside these, `cuda`, `tracing` and `published` are asked for by the
one place that uses each."""


def how_to_install(module: str | None) -> str | None:
    """The sentence for a module that is not installed, or None where no extra has it."""
    extras = (extra for extra, modules in MODULES.items() if str(module).partition(".")[0] in modules)
    return next((f"{module}: is not installed; pip install 'rooflab[{extra}]'" for extra in extras), None)


def need(*extras: str) -> None:
    """Raises `ModuleNotFoundError` where a module of these extras is missing, before a command has begun its work."""
    for module in (module for extra in extras for module in MODULES[extra]):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

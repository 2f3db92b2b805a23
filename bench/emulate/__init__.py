"""Runs kernels in the GPU emulator (`emulator/`) without a GPU, for checks, byte counts and stored outputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rooflab.bench.core import Pool

if TYPE_CHECKING:
    from rooflab.bench.emulate.ours import emulating

__all__ = ["emulating", "emulators", "pool"]


MAX_RUN_S = 1800.0
"""The longest time of one emulated run, in seconds."""


def pool(environment: Mapping[str, str | None], *modules: str) -> Pool:
    """Returns a new pool of processes that emulate kernels.  Each has one thread, and no Triton interpreter.

    Each process first imports `modules`."""
    variables = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1", **environment}
    return Pool(*modules, "rooflab.bench.emulate.emulate_worker", environment=variables, limit_s=MAX_RUN_S)


@cache
def emulators() -> Pool:
    """Returns the pool of processes that emulate kernels with the installed Triton, kept until the program ends."""
    return pool({})


def __getattr__(name: str) -> Any:
    """Imports the function `emulating` at its first use, because this import also loads the emulator."""
    if name != "emulating":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.ours").emulating

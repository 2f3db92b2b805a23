"""Provides comparison kernels ("peers") for row-wise ops such as norms: torch.compile, Liger-Kernel and QuACK.

The peer `compiled` is the op's formula, fused by torch.compile. Liger-Kernel (arXiv 2410.10989, `liger-kernel`) is
written in Triton. QuACK (https://github.com/Dao-AILab/quack, `quack-kernels`) is written in CuTe DSL. Names and
arguments are as in Liger 0.8.5 and QuACK 0.6.5. The first call of each shape compiles for seconds; a time measured
after a warm-up does not contain this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch

from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Backend, get_op

MAX_RECOMPILES = 512
"""The most shapes that may be compiled in a process.  At torch's default limit of 8 a call raises."""
LIGER_LIMITS = {"H": 65536}
"""Liger's limit of the row length H (`calculate_settings`)."""
PACKAGES = {"liger": "liger_kernel", "quack": "quack"}
PEER_BACKENDS: dict[str, Backend] = {"compiled": "torch", "liger": "triton", "quack": "cuda"}


def peer(**takes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that registers a function as a comparison kernel ("peer"). The file's folder names the op.

    The function's name is `compiled`, `liger` or `quack`. Its parameters are the op's arguments that this kernel
    supports. A function named `compiled` is compiled by torch.compile. `takes` are options of the decorator
    `kernel`."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        name = call.__name__
        return kernel(
            role="peer",
            backend=PEER_BACKENDS[name],
            min_sm=90 if name == "quack" else 80,
            devices=("cuda",),
            requires=(PACKAGES[name],) if name in PACKAGES else (),
            traffic=get_op(call.__module__.split(".")[-2]).least,
            **takes,
        )(compiled(call) if name == "compiled" else call)

    return decorate


def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles `formula` by torch.compile at the first call of each shape, as one graph."""

    @cache
    def made() -> Callable[..., Any]:
        return torch.compile(formula, fullgraph=True, dynamic=False)

    @wraps(formula)
    def call(**inputs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=MAX_RECOMPILES, accumulated_recompile_limit=MAX_RECOMPILES):
            return made()(**inputs)

    return call


def theirs(module: str, name: str) -> Callable[..., Any]:
    """Returns the function `name` of another package.  Imports the package at the first call of the function."""
    return lambda *args: getattr(import_module(module), name)(*args)

"""Adapters of ops over rows to torch.compile, Liger-Kernel and QuACK, made of the one call that each op needs.

`compiled` is torch's second library twin: the op's formula, fused by torch.compile.  Liger-Kernel (arXiv 2410.10989,
`liger-kernel`) is written in Triton, QuACK (https://github.com/Dao-AILab/quack, `quack-kernels`) in CuTe DSL; names and
arguments are those of Liger 0.8.5 and QuACK 0.6.5.  The first call of each shape compiles, which takes seconds; a time
measured after a warm-up does not contain it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Backend, get_op
from rooflab.reference.spec import Arguments

SHAPES = 512
"""Shapes that may be compiled in one process; at torch's default limit of 8 a call raises."""
LIGER = {"H": 65536}
"""The longest row that Liger takes (`calculate_settings`)."""
PACKAGES = {"liger": "liger_kernel", "quack": "quack"}
BACKENDS: dict[str, Backend] = {"compiled": "torch", "liger": "triton", "quack": "cuda"}


def peer(
    op: str,
    name: str,
    call: Callable[..., Any],
    traffic: Callable[[Arguments], Any],
    *,
    lacks: tuple[str, ...] = (),
    **takes: Any,
) -> None:
    """Registers `call` as the peer `name` of `op`; it takes the op's arguments by name, but for those it `lacks`,
    as the fields `takes` of `Takes` say."""
    parameters = [parameter for parameter in get_op(op).parameters if parameter.name not in lacks]

    def adapter(**given: Any) -> Any:
        return call(**given)

    adapter.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what the launcher reads
    adapter.__name__, adapter.__module__ = name, call.__module__
    adapter.__doc__ = f"`{op}` by {name}; on CUDA only."
    kernel(
        role="peer", backend=BACKENDS[name], min_sm=90 if name == "quack" else 80, devices=("cuda",), traffic=traffic,
        requires=(PACKAGES[name],) if name in PACKAGES else (), **takes,
    )(adapter)  # fmt: skip


def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """`formula` through torch.compile, as one graph of fixed shapes; nothing is compiled before the first call."""

    @cache
    def made() -> Callable[..., Any]:
        return torch.compile(formula, fullgraph=True, dynamic=False)

    def call(**inputs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
            return made()(**inputs)

    call.__module__ = formula.__module__
    return call


def theirs(module: str, name: str) -> Callable[..., Any]:
    """A function of another package, imported at its first call."""

    def call(*args: Any) -> Any:
        return getattr(import_module(module), name)(*args)

    return call

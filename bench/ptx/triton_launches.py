"""Turns every launch of Triton and Gluon into an emulated one: runs in a process without the interpreter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from rooflab.bench.compile.capture import FakeDriver, check_internals

Handle = Callable[[Any, tuple[int, ...], list[Any]], None]
"""Takes a compiled kernel, its grid and its arguments."""


@contextmanager
def emulating_triton(sm: int, properties: Mapping[str, int], handle: Handle) -> Iterator[None]:
    """Compiles each launch for `sm` and gives it to `handle`; an autotuned kernel runs by its first config."""
    check_internals()
    run, tune = JITFunction.run, Autotuner.run

    def instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if warmup:
            return kernel
        values = _bound(self, args, kwargs)
        if callable(grid):
            grid = grid(values)
        if 0 in grid:
            return kernel  # Triton's launcher leaves such a launch out
        handle(kernel, tuple(int(size) for size in grid), _runtime(kernel, values))
        return kernel

    def first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = next(iter(self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs))
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        kernel = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return kernel

    triton.runtime.driver.set_active(FakeDriver(sm, properties))
    JITFunction.run, Autotuner.run = instead, first_config
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, tune


def _bound(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of the kernel's signature by name."""
    names = set(function.arg_names)
    own = {name: value for name, value in kwargs.items() if name in names}
    given = inspect.signature(function.fn).bind(*args, **own)
    given.apply_defaults()
    return dict(given.arguments)


def _runtime(kernel: Any, values: Mapping[str, Any]) -> list[Any]:
    """Those that the compiled kernel takes: not its constexprs, and not what was specialised away."""
    signature = kernel.src.signature
    names = kernel.src.fn.arg_names
    found = []
    for key, kind in signature.items():
        name = key if isinstance(key, str) else names[key[0] if isinstance(key, tuple) else key]
        if kind != "constexpr":
            found.append(values[name])
    return found

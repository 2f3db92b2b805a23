"""Measures the time of each op in the engine's steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from rooflab.engine.model_runner import ModelRunner

Spent = defaultdict[str, list[float]]
"""For each op, the seconds of each call."""
Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""A function that takes an op's name and function, and returns the function to use instead."""


@contextmanager
def wrapped_ops(runner: ModelRunner, wrap: Wrap) -> Iterator[None]:
    """Replaces each op of a step by `wrap(name, op)` in a `with` block, without CUDA graphs, which call no ops."""
    ops, cuda_graphs = runner.ops, runner.graphs

    def step(*sizes: int) -> SimpleNamespace:
        return SimpleNamespace(**{op: wrap(op, function) for op, function in vars(ops.step(*sizes)).items()})

    runner.ops, runner.graphs = SimpleNamespace(step=step), None  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.ops, runner.graphs = ops, cuda_graphs


def timed_ops(runner: ModelRunner, spent: Spent) -> AbstractContextManager[None]:
    """Returns a context that adds the seconds of each call of an op to `spent`.

    On a GPU these are the times of launches, because nothing waits for the device."""

    def timed(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **options)
            spent[op].append(time.perf_counter() - start)
            return result

        return call

    return wrapped_ops(runner, timed)

"""The time of each op in the engine's steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from rooflab.engine.model_runner import ModelRunner

Spent = defaultdict[str, list[float]]
"""The seconds of each call, by op."""
Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes an op's name and its function, and gives another function in its place."""


@contextmanager
def wrapped_ops(runner: ModelRunner, wrap: Wrap) -> Iterator[None]:
    """Puts `wrap` around each op of the engine's steps; a graph would make no calls, so none runs."""
    ops, graphs = runner.ops, runner.graphs

    def step(*sizes: int) -> SimpleNamespace:
        return SimpleNamespace(**{op: wrap(op, function) for op, function in vars(ops.step(*sizes)).items()})

    runner.ops, runner.graphs = SimpleNamespace(step=step), None  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.ops, runner.graphs = ops, graphs


def timed_ops(runner: ModelRunner, spent: Spent) -> AbstractContextManager[None]:
    """A context that adds the seconds of each call of an op to `spent`.

    On a GPU they are the times of launches, because no call is awaited.
    """

    def timed(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **options)
            spent[op].append(time.perf_counter() - began)
            return result

        return call

    return wrapped_ops(runner, timed)

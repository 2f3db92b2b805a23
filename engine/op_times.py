"""The time of each op in the engine's steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rooflab.engine.model_runner import ModelRunner

Spent = defaultdict[str, list[float]]
"""The seconds of each call, by op."""


@contextmanager
def timed_ops(runner: ModelRunner, spent: Spent) -> Iterator[None]:
    """Adds the seconds of each call of an op to `spent`; a graph would make no calls, so none runs.

    On a GPU they are the times of launches, because no call is awaited.
    """

    def timed(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **options)
            spent[op].append(time.perf_counter() - began)
            return result

        return call

    ops, graphs = runner.ops, runner.graphs

    def step(*sizes: int) -> SimpleNamespace:
        return SimpleNamespace(**{op: timed(op, one) for op, one in vars(ops.step(*sizes)).items()})

    runner.ops, runner.graphs = SimpleNamespace(step=step), None  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.ops, runner.graphs = ops, graphs

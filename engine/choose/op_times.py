"""Measures the time of each op in the engine's steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from rooflab.engine.choose.model_shapes import DECODE_OP, MATMUL_OPS
from rooflab.engine.graphs import DecodeReplays
from rooflab.engine.model_runner import ModelRunner

Spent = defaultdict[str, list[float]]
"""For each op, the seconds of each call."""
OpWrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""A function that takes an op's name and function, and returns the function to use instead."""


@contextmanager
def wrapped_ops(
    runner: ModelRunner, wrap: OpWrapper, note_time: Callable[[str, float], None] | None = None
) -> Iterator[None]:
    """Replaces each op of a step by `wrap(name, op)` in a `with` block.  CUDA graphs are off: a replay calls no ops."""
    model_ops, decode_graphs = runner.ops, runner.graphs
    decode_replays = decode_graphs if note_time and isinstance(decode_graphs, DecodeReplays) else None

    def step(*sizes: int) -> SimpleNamespace:
        return SimpleNamespace(**{op: wrap(op, op_call) for op, op_call in vars(model_ops.step(*sizes)).items()})

    runner.ops, runner.graphs = SimpleNamespace(step=step), decode_replays  # type: ignore[assignment]
    if decode_replays:
        decode_replays.note_time = note_time
    try:
        yield
    finally:
        runner.ops, runner.graphs = model_ops, decode_graphs
        if decode_replays:
            decode_replays.note_time = None


def timed_ops(runner: ModelRunner, spent: Spent) -> AbstractContextManager[None]:
    """Returns a context.  Inside it, the seconds of each call of an op are appended to `spent`.

    On a GPU these are the times of launches, because nothing waits for the device."""

    def timed(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start_time = time.perf_counter()
            call_result = function(*arguments, **options)
            spent[op].append(time.perf_counter() - start_time)
            return call_result

        return call

    def note_time(kernel: str, seconds: float) -> None:
        op = kernel.partition("/")[0]
        spent[{"paged_attention": DECODE_OP, **dict.fromkeys(MATMUL_OPS, "gemm")}.get(op, op)].append(seconds)

    return wrapped_ops(runner, timed, note_time)

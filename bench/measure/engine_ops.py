"""Where the time of an engine's decode step goes: calls, microseconds and share of each op."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rooflab.engine.llm import LLM, SamplingParams


def time_ops(llm: LLM, ids: list[int], steps: int = 32) -> dict[str, dict[str, float]]:
    """By op: `calls` and `us` per step, and `share` of the step, over `steps` decode steps behind the prompt `ids`.

    What is left of the step is `host`.  On a GPU the times are those of launches, because no call is awaited.
    """
    spent: dict[str, list[float]] = defaultdict(list)
    request = llm.add_request(ids, SamplingParams(max_tokens=steps + 2, ignore_eos=True))
    while not any(sequence.output_ids for sequence in llm.scheduler.running):
        llm.step()
    with _timed(llm, spent):
        began = time.perf_counter()
        for _ in range(steps):
            assert [sequence.request_id for sequence in llm.step()] == [request], "it is alone"
        whole_us = 1e6 * (time.perf_counter() - began) / steps
    llm.step()
    table = {op: {"calls": len(own) / steps, "us": 1e6 * sum(own) / steps} for op, own in spent.items()}
    table["host"] = {"calls": 1.0, "us": whole_us - sum(row["us"] for row in table.values())}
    return {op: {**row, "share": row["us"] / whole_us} for op, row in sorted(table.items(), key=lambda i: -i[1]["us"])}


@contextmanager
def _timed(llm: LLM, spent: dict[str, list[float]]) -> Iterator[None]:
    """Adds the seconds of each call of an op to `spent`; a graph would make no calls, so none runs."""

    def timed(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **options)
            spent[op].append(time.perf_counter() - began)
            return result

        return call

    ops, graphs = llm.runner.ops, llm.runner.graphs

    def step(*sizes: int) -> SimpleNamespace:
        return SimpleNamespace(**{op: timed(op, one) for op, one in vars(ops.step(*sizes)).items()})

    llm.runner.ops, llm.runner.graphs = SimpleNamespace(step=step), None  # type: ignore[assignment]
    try:
        yield
    finally:
        llm.runner.ops, llm.runner.graphs = ops, graphs

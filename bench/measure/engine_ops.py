"""Where the time of an engine's decode step goes: calls, microseconds and share of each op."""

from __future__ import annotations

import time
from collections import defaultdict

from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.op_times import Spent, timed_ops


def time_ops(llm: LLM, ids: list[int], steps: int = 32) -> dict[str, dict[str, float]]:
    """By op: `calls` and `us` per step, and `share` of the step, over `steps` decode steps behind the prompt `ids`.

    What is left of the step is `host`.  On a GPU the times are those of launches, because no call is awaited.
    """
    spent: Spent = defaultdict(list)
    request = llm.add_request(ids, SamplingParams(max_tokens=steps + 2, ignore_eos=True))
    while not any(sequence.output_ids for sequence in llm.scheduler.running):
        llm.step()
    with timed_ops(llm.runner, spent):
        began = time.perf_counter()
        for _ in range(steps):
            assert [sequence.request_id for sequence in llm.step()] == [request], "it is alone"
        whole_us = 1e6 * (time.perf_counter() - began) / steps
    llm.step()
    table = {op: {"calls": len(own) / steps, "us": 1e6 * sum(own) / steps} for op, own in spent.items()}
    table["host"] = {"calls": 1.0, "us": whole_us - sum(row["us"] for row in table.values())}
    return {op: {**row, "share": row["us"] / whole_us} for op, row in sorted(table.items(), key=lambda i: -i[1]["us"])}

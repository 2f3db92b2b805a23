"""The results of a run: a record, its trace, and on request a file with the keys of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rooflab.bench.core import Environment, Record, Status
from rooflab.bench.load.definitions import TOOLS, DefinedTimes
from rooflab.bench.load.load_run import Plan
from rooflab.bench.load.metrics import broken, failures, noise, output_tokens, prompt_tokens, summarize
from rooflab.bench.load.trace import Request, Trace

VLLM = next(tool for tool in TOOLS if tool.name == "vLLM")


def record_of(trace: Trace, limits: Mapping[str, float], run_id: str) -> Record:
    """The record of a run; its environment is the client's environment."""
    metrics, fault, unsure = summarize(trace, limits), broken(trace), noise(trace)
    answered = metrics["requests"] > metrics["failed"]
    status: Status = "RUNTIME_ERROR" if fault else "NOISY" if unsure else "OK"
    goodput = {f"goodput_{name}_ms": limit for name, limit in limits.items()}
    case = {name: value for name, value in trace.case.items() if name != "seed"}
    return Record(
        kind="engine",
        run_id=run_id,
        status=status,
        reason=fault or unsure,
        **Environment.now().record_fields(),
        case_id="load",
        case={**case, **goodput},
        seed=trace.case.get("seed"),
        basis="measured" if answered else "bound",
        timer="perf_counter",
        metrics=metrics,
    )


def exit_status(trace: Trace) -> str:
    """The status: OK, NOISY, or RUNTIME_ERROR if a request failed."""
    return "RUNTIME_ERROR" if failures(trace) or broken(trace) else "NOISY" if noise(trace) else "OK"


def vllm_json(trace: Trace, plan: Plan, limits: Mapping[str, float]) -> dict[str, Any]:
    """The keys of vLLM's result file, by vLLM's definitions (`definitions.py`), for the requests after the warm-up.

    Texts are not kept, so that `generated_texts` is missing; a limit of `itl` has no counterpart and is left out.
    """
    requests = trace.counted
    readings = [None if request.error else VLLM.reading(request) for request in requests]
    pairs = [(request, own) for request, own in zip(requests, readings, strict=True) if own is not None]
    lengths = [output_tokens(request) if own else 0 for request, own in zip(requests, readings, strict=True)]
    duration = VLLM.seconds(trace, [request for request, _ in pairs]) if pairs else 0.0
    inputs = [prompt_tokens(request) for request in requests]
    total_in, total_out = sum(prompt_tokens(request) for request, _ in pairs), sum(lengths)
    rate = plan.arrivals.rate if plan.arrivals else math.inf
    good = sum(_good(own, limits) for _, own in pairs)
    per_s = 1 / duration if duration else 0.0
    values = {
        "ttft": [own.ttft for _, own in pairs],
        "tpot": [value for _, own in pairs for value in own.tpot],
        "itl": [gap for _, own in pairs for gap in own.itl],
        "e2el": [own.e2e for _, own in pairs],
    }
    return {
        "date": f"{datetime.now(UTC):%Y%m%d-%H%M%S}",
        "backend": "openai-chat" if plan.endpoint == "chat" else "openai",
        "label": None,
        "model_id": plan.model,
        "tokenizer_id": plan.model,
        "num_prompts": len(requests),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": plan.arrivals.burstiness if plan.arrivals else 1.0,
        "max_concurrency": plan.max_concurrency if plan.arrivals else plan.concurrency,
        "duration": duration,
        "completed": len(pairs),
        "failed": len(requests) - len(pairs),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(pairs) * per_s,
        "request_goodput": good * per_s if limits else None,
        "output_throughput": total_out * per_s,
        "total_token_throughput": (total_in + total_out) * per_s,
        "input_lens": inputs,
        "output_lens": lengths,
        "ttfts": [own.ttft if own else 0.0 for own in readings],
        "itls": [list(own.itl) if own else [] for own in readings],
        "latencies": [own.e2e if own else 0.0 for own in readings],
        "start_times": [request.sent_s for request in requests],
        "queue_times": [request.free_s - request.scheduled_s for request in requests],
        "errors": [request.error for request in requests],
        **_peaks(pairs),
        "rtfx": 0.0,
        **{key: value for name, own in values.items() for key, value in _statistics(name, own).items()},
    }


def _good(own: DefinedTimes, limits: Mapping[str, float]) -> bool:
    values = {"ttft": own.ttft, "tpot": sum(own.tpot), "e2e": own.e2e}
    return all(1e3 * value <= limits.get(name, math.inf) for name, value in values.items())


def _peaks(pairs: Sequence[tuple[Request, DefinedTimes]]) -> dict[str, float]:
    """The most chunks in a second from the first send on, which vLLM calls tokens; and the most requests at once."""
    if not pairs:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    begin = min(request.sent_s for request, _ in pairs)
    times = [request.sent_s + own.ttft + np.cumsum([0.0, *own.itl]) - begin for request, own in pairs]
    events = sorted(pair for request, own in pairs for pair in ((request.sent_s, 1), (request.sent_s + own.e2e, -1)))
    running = np.cumsum([change for _, change in events])
    chunks = np.bincount(np.concatenate(times).astype(int))
    return {"max_output_tokens_per_s": float(chunks.max()), "max_concurrent_requests": int(running.max())}


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    own = 1e3 * np.array(seconds or [0.0])
    found = {"mean": np.mean(own), "median": np.median(own), "std": np.std(own), "p99": np.percentile(own, 99)}
    return {f"{key}_{name}_ms": float(value) for key, value in found.items()}


def trace_file(folder: Path, name: str) -> Path:
    """The path of a run's trace: `trace.ndjson`, or in a sweep `trace-<rate>.ndjson`."""
    return folder / (f"trace-{name}.ndjson" if name else "trace.ndjson")

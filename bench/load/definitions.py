"""The metric X-ray: the numbers that each tool would report for one trace, by its own definitions, side by side.

The definitions were read in the sources named below, and each is written anew here.  A dash is a metric that a tool
does not have under that name.  Tools differ in the begin and the end of a request, in the first chunk that counts, in
whether ITL has a value for each gap or for each request, and in the percentile.  AIPerf 0.13.0 and GuideLLM 0.8.1 were
run through `tap`; their reports are compared with their rows in results/serving/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rooflab.bench.load.metrics import output_tokens, times_of
from rooflab.bench.load.trace import Request, StreamEvent, Trace


@dataclass(frozen=True)
class DefinedTimes:
    """The times of one request by one tool's definitions, in seconds."""

    ttft: float
    e2e: float
    itl: Sequence[float]
    tpot: Sequence[float]
    """Values of TPOT: empty if the tool has none for this request; a value that counts n times is there n times."""


@dataclass(frozen=True)
class Tool:
    """The definitions of a tool."""

    name: str
    read: str
    """The sources, and the commit or date at which they were read."""
    ttft: str
    itl: str
    tpot: str
    e2e: str
    throughput: str
    reading: Callable[[Request], DefinedTimes | None]
    seconds: Callable[[Trace, Sequence[Request]], float]
    """The seconds by which output tokens are divided."""
    percentile: Callable[[Sequence[float], int], float] = np.percentile
    """The percentile of values; by default it interpolates between two of them."""


def _at_the_index(values: Sequence[float], q: int) -> float:
    """Returns the value at the index n q / 100 of n sorted values."""
    return sorted(values)[min(len(values) - 1, len(values) * q // 100)]


def _kinds(request: Request, *kinds: str) -> list[StreamEvent]:
    return [chunk for chunk in request.chunks if chunk.kind in kinds]


def _per_token(time_s: float, tokens: int) -> list[float]:
    return [time_s / (tokens - 1)] if tokens > 1 else []


def _by_chunks(
    request: Request, *kinds: str, due: bool = False, whole: bool = False, gaps: bool = True
) -> DefinedTimes | None:
    """The times from the send, or from when the request was due, to the first and the last chunk of these kinds, or to
    the last chunk of the `whole` stream."""
    if not (chunks := _kinds(request, *kinds)):
        return None
    begin, last = request.scheduled_s if due else request.sent_s, (request.chunks if whole else chunks)[-1]
    ttft, e2e = chunks[0].time_s - begin, last.time_s - begin
    itl = [later.time_s - before.time_s for before, later in pairwise(chunks)] if gaps else []
    return DefinedTimes(ttft, e2e, itl, _per_token(e2e - ttft, output_tokens(request)))


def _aiperf(request: Request) -> DefinedTimes | None:
    if not (texts := _kinds(request, "text")):
        return None
    ttft, e2e = (chunk.time_s - request.sent_s for chunk in (texts[0], texts[-1]))
    tokens, first = output_tokens(request), texts[0].tokens or 1
    behind = tokens - first if 0 < first < tokens else tokens - 1
    return DefinedTimes(ttft, e2e, [(e2e - ttft) / behind] if tokens > 1 else [], [])


def _guidellm(request: Request) -> DefinedTimes | None:
    if not (texts := _kinds(request, "text")):
        return None
    first, last = texts[0].time_s, texts[-1].time_s
    end = request.chunks[-1].time_s if request.end_s is None else request.end_s
    tokens, itl = output_tokens(request), _per_token(last - first, output_tokens(request))
    tpot = [(last - request.sent_s) / tokens] if tokens else []
    return DefinedTimes(first - request.sent_s, end - request.sent_s, itl * (tokens - 1), tpot * tokens)


def _ours(request: Request) -> DefinedTimes | None:
    if (times := times_of(request)) is None:
        return None
    tpot = [] if times.tpot_ms is None else [times.tpot_ms / 1e3]
    return DefinedTimes(times.ttft_ms / 1e3, times.e2e_ms / 1e3, [float(gap) / 1e3 for gap in times.itl_ms], tpot)


def _last_text(requests: Sequence[Request]) -> float:
    """The time of the last text chunk; without any text, the time of the last token of the answers."""
    kinds = ("text",) if any(_kinds(request, "text") for request in requests) else ("empty",)
    return max(chunk.time_s for request in requests for chunk in _kinds(request, *kinds))


def _whole_run(trace: Trace, requests: Sequence[Request]) -> float:
    """The seconds from the begin of the run, before its first gap, to the last end."""
    return _last_end(requests) - (trace.begin_s + trace.warmup_s)


def _last_end(requests: Sequence[Request]) -> float:
    return max(request.end_s or 0.0 for request in requests)


def _first_send(requests: Sequence[Request]) -> float:
    return min(request.sent_s for request in requests)


def _due_to_last_token(trace: Trace, requests: Sequence[Request]) -> float:
    last = max(float(times.token_times_s[-1]) for request in requests if (times := times_of(request)))
    return last - min(request.scheduled_s for request in trace.counted)


TOOLS = (
    Tool(
        name="rooflab",
        read="bench/load/metrics.py",
        ttft="first token - scheduled arrival",
        itl="gaps per token, a bundle of k tokens as k gaps; pooled",
        tpot="(E2E - TTFT) / tokens behind the first chunk",
        e2e="last token - scheduled arrival",
        throughput="output tokens / (first arrival to last token)",
        reading=_ours,
        seconds=_due_to_last_token,
    ),
    Tool(
        name="vLLM",
        read="vllm/benchmarks/lib/endpoint_request_func.py at 02cfb534, serve.py at 009e6d4a",
        ttft="first chunk with a choice, also a role or an empty text - send",
        itl="gaps between chunks with a choice, bundles not divided; pooled",
        tpot="(E2E - TTFT) / (output tokens - 1)",
        e2e="last chunk with a choice - send",
        throughput="output tokens / (start of the run to its end)",
        reading=lambda request: _by_chunks(request, "text", "empty", "role"),
        seconds=_whole_run,
    ),
    Tool(
        name="SGLang",
        read="python/sglang/benchmark/backends/oai_client.py at 6c32c289, oai_chat_client.py at 55c7579c, metrics.py",
        ttft="first chunk with text - send",
        itl="gaps between chunks with text; pooled (divided by retokenised text only if the server speculates)",
        tpot="(E2E - TTFT) / (output tokens - 1)",
        e2e="last line of the stream, also usage and [DONE] - send",
        throughput="output tokens / (start of the run to its end)",
        reading=lambda request: _by_chunks(request, "text", whole=True),
        seconds=_whole_run,
    ),
    Tool(
        name="AIPerf",
        read="src/aiperf/metrics/types/{ttft,inter_token_latency,request_latency}_metric.py at 58028d5b, 58dd5dea",
        ttft="first chunk with text - send",
        itl="(E2E - TTFT) / (output tokens - those of the first chunk, if it tells, else 1); one value a request",
        tpot="",
        e2e="last chunk with text - send",
        throughput="output tokens / (first send to last text)",
        reading=_aiperf,
        seconds=lambda trace, requests: _last_text(requests) - _first_send(requests),
    ),
    Tool(
        name="GuideLLM",
        read="src/guidellm/schemas/base/{request_stats,statistics}.py and backends/openai/http.py of 0.8.1",
        ttft="first chunk with text - send",
        itl="(last text - first text) / (output tokens - 1); one value a request, as often as it has such tokens",
        tpot="(last text - send) / output tokens: has the TTFT in it; one value a request, as often as it has tokens",
        e2e="end of the stream - send",
        throughput="output tokens / (first send to end of the last stream)",
        reading=_guidellm,
        seconds=lambda trace, requests: _last_end(requests) - _first_send(requests),
        percentile=partial(np.percentile, method="inverted_cdf"),  # the least value that is not below q percent of them
    ),
    Tool(
        name="MLPerf",
        read="mlcommons/inference loadgen/logging.cc and results.cc at b66003e1 (Server)",
        ttft="first token - scheduled arrival",
        itl="",
        tpot="(E2E - TTFT) / (output tokens - 1)",
        e2e="completion - scheduled arrival",
        throughput="output tokens / (start of the run to the last completion)",
        reading=lambda request: _by_chunks(request, "text", due=True, gaps=False),
        seconds=lambda trace, requests: _last_text(requests) - trace.begin_s - trace.warmup_s,
        percentile=_at_the_index,
    ),
)


def xray(trace: Trace) -> list[dict[str, Any]]:
    """Returns a row for each tool: medians and 99th percentiles in ms, mean ITL, and output tokens per second.

    Every row has the same requests: those that were answered and came after the warm-up.  Raises `ValueError` if there
    is no such request.
    """
    requests = [request for request in trace.counted if times_of(request)]
    if not requests:
        raise ValueError("trace: expected at least one answered request behind the warm-up, got none")
    rows = []
    for tool in TOOLS:
        readings = [found for request in requests if (found := tool.reading(request))]
        itl = [1e3 * gap for reading in readings for gap in reading.itl]
        values = {
            "ttft": [1e3 * reading.ttft for reading in readings],
            "itl": itl,
            "tpot": [1e3 * value for reading in readings for value in reading.tpot] if tool.tpot else [],
            "e2e": [1e3 * reading.e2e for reading in readings],
        }
        row: dict[str, Any] = {"tool": tool.name}
        for name, own in values.items():
            row |= {f"{name}_p{q}_ms": float(tool.percentile(own, q)) if own else None for q in (50, 99)}
        row["itl_mean_ms"] = float(np.mean(itl)) if itl else None
        row["output_tokens_per_s"] = sum(map(output_tokens, requests)) / tool.seconds(trace, requests)
        rows.append(row)
    return rows


def texts() -> list[dict[str, str]]:
    """For each tool, its definitions in words, and the sources in which they were read."""
    names = ("ttft", "itl", "tpot", "e2e", "throughput", "read")
    return [{"tool": tool.name, **{name: getattr(tool, name) or "-" for name in names}} for tool in TOOLS]

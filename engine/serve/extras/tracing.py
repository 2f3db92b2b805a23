"""Sends traces of requests to OpenTelemetry.  The span of a request contains the spans of queue, prefill and decode."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rooflab.engine.serve.client import Call


def exporter(endpoint: str, model: str) -> tuple[Callable[[Call], None], Callable[[], None]]:
    """Returns two functions: one sends an ended request's spans to `endpoint` (OTLP over HTTP), one ends the exporter.

    Span attributes have the names of OpenTelemetry's conventions for generative AI.  Raises `ValueError` if the
    packages of `rooflab[tracing]` are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        raise ValueError(f"otlp_endpoint: needs `pip install 'rooflab[tracing]'`: {error}") from error

    trace_provider = TracerProvider(resource=Resource.create({"service.name": "rooflab"}))
    trace_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
    tracer = trace_provider.get_tracer("rooflab")
    clock_offset_ns = time.time_ns() - time.perf_counter_ns()

    def at(seconds: float) -> int:
        return clock_offset_ns + int(seconds * 1e9)

    def ended(call: Call) -> None:
        token_times_s = [answer_times for answer_times in call.token_times_s if answer_times]
        now_s = time.perf_counter()
        first_token_s = min((answer_times[0] for answer_times in token_times_s), default=None)
        last_token_s = max((answer_times[-1] for answer_times in token_times_s), default=now_s) if call.ended else now_s
        parent_span = TraceContextTextMapPropagator().extract({"traceparent": call.trace_parent or ""})
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": call.params.max_tokens,
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(map(len, token_times_s)),
            "gen_ai.response.finish_reasons": [str(reason) for reason in call.finish_reasons.values()] or ["abort"],
        }
        if call.params.temperature is not None:
            attributes["gen_ai.request.temperature"] = call.params.temperature
        span = tracer.start_span("llm_request", parent_span, SpanKind.SERVER, attributes, start_time=at(call.arrival_s))
        if not call.ended:
            span.set_status(StatusCode.ERROR, "dropped before its end")
        span_scope = set_span_in_context(span)
        phase_times_s = (call.arrival_s, call.started_s, first_token_s, last_token_s)
        for name, start, end in zip(("queue", "prefill", "decode"), phase_times_s, phase_times_s[1:], strict=False):
            if start is not None:
                tracer.start_span(name, span_scope, start_time=at(start)).end(at(last_token_s if end is None else end))
        span.end(at(last_token_s))

    return ended, trace_provider.shutdown

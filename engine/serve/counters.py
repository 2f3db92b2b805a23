"""Counts metrics for Prometheus.  Metrics with vLLM's names have vLLM's meaning; other names begin with `rooflab:`."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rooflab.engine.serve.client import Call, Engine
from rooflab.engine.serve.wire import Stepped

TIME_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
LABEL_NAMES = ("model_name", "engine")
M = TypeVar("M", Counter, Gauge, Histogram)


class Counters:
    """Updates the metrics after every step of an engine, and after the end of each request."""

    def __init__(self, engine: Engine, model: str):
        self.registry = CollectorRegistry()
        self._blocks = engine.info.num_blocks
        self._labels = (model, "0")

        def of(kind: type[M], name: str, text: str, *labels: str, **more: Any) -> M:
            metric = kind(name, text, (*LABEL_NAMES, *labels), registry=self.registry, **more)
            return metric if labels else metric.labels(*self._labels)

        counter, histogram = partial(of, Counter), partial(of, Histogram, buckets=TIME_BUCKETS_S)
        self._running = of(Gauge, "vllm:num_requests_running", "Answers in the batch.")
        self._waiting = of(Gauge, "vllm:num_requests_waiting", "Answers that wait for the batch.")
        self._usage = of(Gauge, "vllm:kv_cache_usage_perc", "Held pages of the KV cache, as a share of all (0 to 1).")
        self._queries = counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens of prompts that were in the KV cache.")
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = counter("vllm:generation_tokens", "Tokens of answers.")
        self._preempted = counter("vllm:num_preemptions", "Answers that lost their pages.")
        self._success = counter("vllm:request_success", "Requests that ended, by reason.", "finished_reason")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._itl = histogram("vllm:inter_token_latency_seconds", "From a token to the next.")
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its last token.")
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first step with the prompt.")
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From that step's begin to the first token.")
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens of drafts.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that answers got.")
        self._emitted = counter("vllm:spec_decode_num_emitted_tokens", "Tokens of answers from steps with drafts.")
        help_text = "Accepted tokens, by their place in the draft."
        self._accepted_at = counter("vllm:spec_decode_num_accepted_tokens_per_pos", help_text, "position")
        self._step = histogram("rooflab:step_seconds", "One step of the engine.")
        self._evicted = counter("rooflab:prefix_cache_evicted_pages", "Cached pages that were given away.")

    def stepped(self, message: Stepped) -> None:
        """Counts the work of one step."""
        engine_state, step_line = message.state, message.step
        self._running.set(engine_state.running)
        self._waiting.set(engine_state.waiting)
        self._usage.set(engine_state.pages_held / self._blocks)
        self._generated.inc(len(message.tokens))
        if step_line is not None:
            self._step.observe(step_line.end_s - step_line.begin_s)
            self._preempted.inc(step_line.preempted)
            self._evicted.inc(step_line.evicted)
            if step_line.drafts:
                self._drafts.inc(step_line.drafts)
                self._drafted.inc(step_line.drafted)
                self._accepted.inc(sum(step_line.accepted))
                self._emitted.inc(step_line.tokens)
                for draft_position, num_accepted in enumerate(step_line.accepted):
                    self._accepted_at.labels(*self._labels, str(draft_position)).inc(num_accepted)

    def gap(self, seconds: float) -> None:
        """Records a gap between two tokens immediately.  Recording all gaps at the end of an answer took seconds."""
        self._itl.observe(seconds)

    def ended(self, call: Call) -> None:
        """Records the times of a request that has ended or was dropped."""
        finish_reasons = set(call.finish_reasons.values()) if call.ended else {"abort"}
        for finish_reason in finish_reasons:
            self._success.labels(*self._labels, finish_reason).inc()
        token_times_s = [answer_times for answer_times in call.token_times_s if answer_times]
        if call.started_s is not None:
            self._queries.inc(call.prompt_tokens)
            self._hits.inc(call.cached_tokens)
            self._prompt.inc(call.prompt_tokens)
            self._queue.observe(call.started_s - call.arrival_s)
        if not token_times_s or call.started_s is None:
            return
        first_token_s = min(answer_times[0] for answer_times in token_times_s)
        self._ttft.observe(first_token_s - call.arrival_s)
        self._prefill.observe(first_token_s - call.started_s)
        if call.ended:
            last_token_s = max(answer_times[-1] for answer_times in token_times_s)
            self._e2e.observe(last_token_s - call.arrival_s)
            self._decode.observe(last_token_s - first_token_s)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

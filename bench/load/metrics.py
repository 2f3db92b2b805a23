"""Computes the metrics of a load run from its trace.

TTFT and E2E are measured twice: from the scheduled arrival, and from the send.  Only the first includes a late send by
the client (coordinated omission).  ITL is per token: a chunk of `k` tokens counts as `k` equal gaps.  The gaps between
chunks are reported too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rooflab.bench.load.trace import Request, StreamEvent, Trace
from rooflab.roofline.names import values_by_name

MAX_LATE_MS = 1.0
"""The largest median delay of the client's sends, in ms.  Above it, the load was not the requested load."""
MIN_ANSWERED_SHARE = 0.1
"""A run has rates and can be OK only if at least this share of its requests was answered.  A server in overload that
refuses half of the load gives a result.  If it refuses nearly all, the few answers say nothing about that load."""
LIMIT_NAMES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True)
class Times:
    """Holds the times of one answered request, in milliseconds."""

    ttft_ms: float
    ttft_sent_ms: float
    e2e_ms: float
    e2e_sent_ms: float
    tpot_ms: float | None
    """The time per token after the first chunk, over all answers.  None if each answer came in one chunk."""
    itl_ms: np.ndarray
    """The inter-token latencies in ms; empty where `tpot_ms` is None."""
    chunk_gap_ms: np.ndarray
    token_times_s: np.ndarray
    counted: str
    """How the numbers of tokens in the chunks are known; `token_steps` defines the words."""

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Returns whether the request meets all `limits` (in ms, by name).  A limit on `itl` applies to each gap.  A
        missing value does not meet its limit: an answer in one chunk has no gap, but its user may have waited long."""
        ms_by_metric = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        ms_by_metric["itl"] = float(self.itl_ms.max()) if len(self.itl_ms) else None
        return all((value := ms_by_metric[name]) is not None and value <= limit_ms for name, limit_ms in limits.items())


def token_steps(request: Request) -> tuple[list[list[tuple[float, float]]], str]:
    """Returns a list of `(time_s, tokens)` for each answer, and a word that tells how the chunks' tokens are counted:

    - `said`: each chunk gives its number of tokens, by token ids, log-probabilities or a running total.
    - `one each`: each chunk has one token, because the server's total equals the number of chunks.
    - `spread`: the server's total is another number.  Chunks after the first share the rest equally.
    - `chunks`: the server gives no total, so each chunk with text counts as one token.

    A token with an incomplete character has a chunk without text.  `one each` also counts these chunks if the total
    requires it.  The last token of an answer may have no chunk.  Text is never tokenised again."""
    choice_chunks = [chunk for chunk in request.chunks if chunk.kind in ("text", "empty")]
    text_chunks = [chunk for chunk in choice_chunks if chunk.kind == "text"]
    first_chunks = {chunk.answer: chunk for chunk in reversed(text_chunks)}
    num_answers, total_tokens = len(first_chunks), request.output_tokens
    if text_chunks and all(chunk.tokens is not None for chunk in text_chunks):
        return _by_answer((chunk, float(chunk.tokens)) for chunk in choice_chunks if chunk.tokens), "said"
    if total_tokens is None:
        return _by_answer((chunk, 1.0) for chunk in text_chunks), "chunks"
    for chunks in (text_chunks, choice_chunks):
        if len(chunks) == total_tokens:
            return _by_answer((chunk, 1.0) for chunk in chunks), "one each"
    if total_tokens - num_answers <= len(text_chunks) < total_tokens:
        return _by_answer((chunk, 1.0) for chunk in text_chunks), "one each"
    if len(text_chunks) == num_answers:
        return _by_answer((chunk, total_tokens / num_answers) for chunk in text_chunks), "spread"
    share = (total_tokens - num_answers) / (len(text_chunks) - num_answers)
    return _by_answer((chunk, 1.0 if chunk is first_chunks[chunk.answer] else share) for chunk in text_chunks), "spread"


def _by_answer(steps: Iterable[tuple[StreamEvent, float]]) -> list[list[tuple[float, float]]]:
    steps_by_answer: dict[int, list[tuple[float, float]]] = {}
    for chunk, tokens in steps:
        steps_by_answer.setdefault(chunk.answer, []).append((chunk.time_s, tokens))
    return list(steps_by_answer.values())


def times_of(request: Request) -> Times | None:
    """Computes the latencies of a request, or returns None if it failed.  A gap is between tokens of one answer."""
    steps, count_method = token_steps(request)
    if request.error or not steps:
        return None
    answer_arrays = [np.array(answer).T for answer in steps]
    gaps_ms = np.concatenate([1e3 * np.diff(times_s) for times_s, _ in answer_arrays])
    gap_tokens = np.concatenate([tokens[1:] for _, tokens in answer_arrays])
    times_s, tokens = np.concatenate(answer_arrays, axis=1)
    first_token_s, last_token_s = times_s.min(), times_s.max()
    return Times(
        ttft_ms=1e3 * (first_token_s - request.scheduled_s),
        ttft_sent_ms=1e3 * (first_token_s - request.sent_s),
        e2e_ms=1e3 * (last_token_s - request.scheduled_s),
        e2e_sent_ms=1e3 * (last_token_s - request.sent_s),
        tpot_ms=float(gaps_ms.sum() / gap_tokens.sum()) if len(gaps_ms) else None,
        itl_ms=np.repeat(gaps_ms / gap_tokens, np.maximum(1, np.rint(gap_tokens)).astype(int)),
        chunk_gap_ms=gaps_ms,
        token_times_s=np.sort(np.repeat(times_s, np.maximum(1, np.rint(tokens)).astype(int))),
        counted=count_method,
    )


def prompt_tokens(request: Request) -> int:
    """Returns the number of prompt tokens that the server reported.  Without a report, returns the requested number."""
    return request.prompt_tokens or request.asked_prompt_tokens or 0


def output_tokens(request: Request) -> int:
    """Returns the number of output tokens that the server reported.  Otherwise counts the tokens in the chunks."""
    return request.output_tokens or round(sum(tokens for answer in token_steps(request)[0] for _, tokens in answer))


def late_ms(requests: Sequence[Request]) -> np.ndarray:
    """Returns how late the client sent each request, in ms."""
    return 1e3 * np.array([request.sent_s - request.scheduled_s for request in requests])


def summarize(trace: Trace, limits: Mapping[str, float] | None = None) -> dict[str, float]:
    """Computes the metrics of a run.  ITL percentiles are over all tokens of all requests.

    `output_tokens_per_s` divides by the time from the first arrival to the last token.  `steady_output_tokens_per_s`
    counts only tokens before the last arrival.  There are no rates if nearly all requests failed."""
    requests, all_times = trace.requests, answers(trace)
    metrics = {"requests": float(len(requests)), "failed": float(len(requests) - len(all_times))}
    if not all_times:
        return metrics
    pooled_values: dict[str, Sequence[float] | np.ndarray] = {
        name: [getattr(times, f"{name}_ms") for times in all_times] for name in ("ttft", "ttft_sent", "e2e", "e2e_sent")
    }
    pooled_values["itl"], pooled_values["chunk_gap"] = (
        np.concatenate([getattr(times, f"{name}_ms") for times in all_times]) for name in ("itl", "chunk_gap")
    )
    pooled_values["tpot"] = [times.tpot_ms for times in all_times if times.tpot_ms is not None]
    pooled_values["client_late"] = late_ms(requests)
    for name, values in pooled_values.items():
        if len(values):
            metrics |= {f"{name}_p{quantile}_ms": float(np.percentile(values, quantile)) for quantile in (50, 90, 99)}
            metrics[f"{name}_mean_ms"] = float(np.mean(values))
    answered_requests = [request for request in requests if not request.error]
    requested_tokens = sum(request.asked_output_tokens or 0 for request in answered_requests)
    begin_s = min(request.scheduled_s for request in requests)
    duration_s = max(times.token_times_s[-1] for times in all_times) - begin_s
    steady_duration_s = trace.last_arrival_s - begin_s
    tokens = sum(map(output_tokens, answered_requests))
    metrics |= {
        "prompt_tokens": float(sum(map(prompt_tokens, answered_requests))),
        "output_tokens": float(tokens),
        "seconds": float(duration_s),
    }
    metrics |= {"asked_output_tokens": float(requested_tokens)} if requested_tokens else {}
    if len(all_times) < MIN_ANSWERED_SHARE * len(requests):
        return {name: float(metric_value) for name, metric_value in metrics.items()}
    metrics |= {"requests_per_s": len(all_times) / duration_s, "output_tokens_per_s": tokens / duration_s}
    if steady_duration_s >= 1.0:  # in less time, a few tokens would decide
        token_times_s = np.concatenate([times.token_times_s for times in all_times])
        is_steady_token = (begin_s <= token_times_s) & (token_times_s <= trace.last_arrival_s)
        metrics["steady_output_tokens_per_s"] = float(is_steady_token.sum() / steady_duration_s)
    metrics |= tokens_a_step(trace)
    if limits:
        metrics["goodput_requests_per_s"] = sum(times.meets(limits) for times in all_times) / duration_s
    return {name: float(metric_value) for name, metric_value in metrics.items()}


def tokens_a_step(trace: Trace) -> dict[str, float]:
    """Computes the mean number of tokens that a request gets per decode step, and the share of accepted draft tokens.
    With speculative decoding, this mean is above 1.  Only engine steps without prompt tokens count.  The result is
    empty if the server does not report its steps."""
    steps = [step for step in trace.steps or () if step["num_decodes"] and not step["prompt_tokens"]]
    if not steps:
        return {}
    metrics = {"tokens_per_step": sum(step["tokens"] for step in steps) / sum(step["num_decodes"] for step in steps)}
    if drafted_tokens := sum(step.get("drafted", 0) for step in steps):
        metrics["acceptance"] = sum(sum(step["accepted"]) for step in steps) / drafted_tokens
    return metrics


def answers(trace: Trace) -> list[Times]:
    """Returns the latencies of all answered requests."""
    return [times for request in trace.requests if (times := times_of(request))]


def broken(trace: Trace) -> str:
    """Returns a sentence that says why the run has no valid result.  The text is empty if the run is valid."""
    total, num_answered = len(trace.requests), len(answers(trace))
    reason = next(iter(failures(trace)), "none was sent")
    if not num_answered:
        return f"no request was answered: {reason}"
    if num_answered < MIN_ANSWERED_SHARE * total:
        return f"{total - num_answered} of {total} requests failed, so that there are no rates; most often: {reason}"
    return ""


def remarks(trace: Trace) -> list[str]:
    """Returns sentences about properties of the answers that make the metrics less exact."""
    requests = [request for request in trace.requests if times_of(request)]
    request_times, among = answers(trace), f"of {len(requests)} answers"
    lengths = [(request.asked_output_tokens, output_tokens(request)) for request in requests]
    differing = [(asked, got) for asked, got in lengths if asked and asked != got]
    notes = []
    if differing:
        asked, got = (sum(token_counts) for token_counts in zip(*differing, strict=True))
        hint = "; the server does not keep ignore_eos" if trace.case.get("ignore_eos") and got < asked else ""
        notes += [f"{len(differing)} {among} have another length than asked: {asked:,} tokens asked, {got:,} got{hint}"]
    if num_estimated := sum(times.counted == "spread" and times.tpot_ms is not None for times in request_times):
        notes += [f"ITL and TPOT are spread evenly in {num_estimated} {among}: no chunk says how many tokens it has"]
    if num_no_usage := sum(times.counted == "chunks" for times in request_times):
        notes += [f"{num_no_usage} {among} have no usage: each chunk counts as one token"]
    if num_one_chunk := sum(times.tpot_ms is None for times in request_times):
        notes += [f"{num_one_chunk} {among} came in one chunk: they have no ITL and no TPOT, and meet no limit on them"]
    if trace.repeated:
        notes += [
            f"{trace.repeated} of {len(trace.requests)} requests repeat an earlier one: a prefix cache knows them"
        ]
    return notes


def failures(trace: Trace) -> dict[str, int]:
    """Counts the failed requests for each reason.  The most frequent reason comes first."""
    return dict(Counter(request.error for request in trace.requests if request.error).most_common())


def noise(trace: Trace) -> str:
    """Returns a sentence if the run is NOISY because the client sent requests late.  Else returns an empty text."""
    median_delay_ms = float(np.median(late_ms(trace.requests))) if trace.requests else 0.0
    return (
        f"the client sent half of the requests over {median_delay_ms:.2f} ms late; at most {MAX_LATE_MS:g} ms"
        if median_delay_ms > MAX_LATE_MS
        else ""
    )


def check_limits(texts: Sequence[str]) -> dict[str, float]:
    """Parses limits such as `ttft:500` (milliseconds).  Raises `ValueError` on an invalid text."""

    def limit(name: str, value: str) -> float:
        if name not in LIMIT_NAMES or not float(value) > 0:
            raise ValueError
        return float(value)

    expected_text = f"goodput: expected NAME:MILLISECONDS, once each of {', '.join(LIMIT_NAMES)}"
    return values_by_name(texts, expected_text, limit, ":")

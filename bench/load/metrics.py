"""Computes the metrics of a trace.

TTFT and E2E are measured twice: from the scheduled arrival, and from the send.  The client or its limit of concurrent
requests may delay a request.  Only the value from the scheduled arrival includes this delay (coordinated omission). ITL
is per token: the gap before a chunk of k tokens counts as k gaps of 1/k each.  So chunks of several tokens do not
inflate ITL.  The gaps between chunks, as a user sees them, are reported too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rooflab.bench.load.trace import Request, StreamEvent, Trace
from rooflab.roofline.names import values_by_name

LATE_MS = 1.0
"""The largest median delay of the client's sends, in ms.  Above it, the load was not the requested load."""
ANSWERED = 0.1
"""A run has rates and can be OK only if at least this share of its requests was answered.  A server in overload that
refuses half of the load gives a result.  If it refuses nearly all, the few answers say nothing about that load."""
LIMITS = ("ttft", "itl", "tpot", "e2e")


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
        """Returns whether the request meets all limits in ms.  A limit on `itl` applies to every single gap.  If the
        limited value is missing, the limit is not met: an answer in one chunk has no gap, but its user may have waited
        long for it."""
        measured = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        measured["itl"] = float(self.itl_ms.max()) if len(self.itl_ms) else None
        return all((value := measured[name]) is not None and value <= limit for name, limit in limits.items())


def token_steps(request: Request) -> tuple[list[list[tuple[float, float]]], str]:
    """Returns the times and numbers of tokens for each answer of the request (`n` answers), and how the numbers are
    known. Text is never tokenised again to count tokens.

    The second result is one of four words.  `said`: the chunks give the numbers, by ids, log-probabilities or a running
    usage.  `one each`: each chunk has one token.  The usage then equals the number of chunks with text, or of all
    chunks (a token whose character is not complete has no text).  It may also be higher by one per answer (a token that
    ends the text has no chunk).  A chunk with only the role may be sent at once, and counts no token.  `spread`: the
    usage is another number, so each chunk after the first gets the same share.  `chunks`: there is no usage, so each
    chunk with text counts as one token."""
    choices = [chunk for chunk in request.chunks if chunk.kind in ("text", "empty")]
    texts = [chunk for chunk in choices if chunk.kind == "text"]
    firsts = {chunk.answer: chunk for chunk in reversed(texts)}
    answers, total = len(firsts), request.output_tokens
    if texts and all(chunk.tokens is not None for chunk in texts):
        return _by_answer((chunk, float(chunk.tokens)) for chunk in choices if chunk.tokens), "said"
    if total is None:
        return _by_answer((chunk, 1.0) for chunk in texts), "chunks"
    for chunks in (texts, choices):
        if len(chunks) == total:
            return _by_answer((chunk, 1.0) for chunk in chunks), "one each"
    if total - answers <= len(texts) < total:
        return _by_answer((chunk, 1.0) for chunk in texts), "one each"
    if len(texts) == answers:
        return _by_answer((chunk, total / answers) for chunk in texts), "spread"
    share = (total - answers) / (len(texts) - answers)
    return _by_answer((chunk, 1.0 if chunk is firsts[chunk.answer] else share) for chunk in texts), "spread"


def _by_answer(steps: Iterable[tuple[StreamEvent, float]]) -> list[list[tuple[float, float]]]:
    by_answer: dict[int, list[tuple[float, float]]] = {}
    for chunk, tokens in steps:
        by_answer.setdefault(chunk.answer, []).append((chunk.time_s, tokens))
    return list(by_answer.values())


def times_of(request: Request) -> Times | None:
    """Returns the times of a request, or None if the request failed.  Gaps are measured only within one answer."""
    steps, counted = token_steps(request)
    if request.error or not steps:
        return None
    arrays = [np.array(answer).T for answer in steps]
    gaps = np.concatenate([1e3 * np.diff(times_s) for times_s, _ in arrays])
    gap_tokens = np.concatenate([tokens[1:] for _, tokens in arrays])
    times_s, tokens = np.concatenate(arrays, axis=1)
    first, last = times_s.min(), times_s.max()
    return Times(
        ttft_ms=1e3 * (first - request.scheduled_s),
        ttft_sent_ms=1e3 * (first - request.sent_s),
        e2e_ms=1e3 * (last - request.scheduled_s),
        e2e_sent_ms=1e3 * (last - request.sent_s),
        tpot_ms=float(gaps.sum() / gap_tokens.sum()) if len(gaps) else None,
        itl_ms=np.repeat(gaps / gap_tokens, np.maximum(1, np.rint(gap_tokens)).astype(int)),
        chunk_gap_ms=gaps,
        token_times_s=np.sort(np.repeat(times_s, np.maximum(1, np.rint(tokens)).astype(int))),
        counted=counted,
    )


def prompt_tokens(request: Request) -> int:
    """Returns the number of prompt tokens that the server reported, or else the number that the client requested."""
    return request.prompt_tokens or request.asked_prompt_tokens or 0


def output_tokens(request: Request) -> int:
    """Returns the number of output tokens that the server reported, or else the number that the chunks give."""
    return request.output_tokens or round(sum(tokens for answer in token_steps(request)[0] for _, tokens in answer))


def late_ms(requests: Sequence[Request]) -> np.ndarray:
    """Returns the delay in ms that the client itself added to each send, without the wait at the concurrency limit."""
    return 1e3 * np.array([request.sent_s - request.free_s for request in requests])


def summarize(trace: Trace, limits: Mapping[str, float] | None = None) -> dict[str, float]:
    """Computes the metrics of a run without its warm-up.  Percentiles interpolate linearly.  The ITL values of all
    requests are pooled.

    `output_tokens_per_s` covers the time from the first arrival to the last token, including the cool-down.
    `steady_output_tokens_per_s` covers only the time up to the last arrival, and also counts tokens of warm-up
    requests.  A run has no rates if nearly all of its requests failed (`ANSWERED`)."""
    requests, timed = trace.counted, answers(trace)
    metrics = {"requests": float(len(requests)), "failed": float(len(requests) - len(timed))}
    if not timed:
        return metrics
    client_delays, queued = late_ms(requests), [1e3 * (request.free_s - request.scheduled_s) for request in requests]
    pooled: dict[str, Sequence[float] | np.ndarray] = {
        name: [getattr(times, f"{name}_ms") for times in timed] for name in ("ttft", "ttft_sent", "e2e", "e2e_sent")
    }
    pooled["itl"], pooled["chunk_gap"] = (
        np.concatenate([getattr(times, f"{name}_ms") for times in timed]) for name in ("itl", "chunk_gap")
    )
    pooled["tpot"] = [times.tpot_ms for times in timed if times.tpot_ms is not None]
    pooled |= {"client_queue": queued, "client_late": client_delays}
    for name, values in pooled.items():
        if len(values):
            metrics |= {f"{name}_p{q}_ms": float(np.percentile(values, q)) for q in (50, 90, 99)}
            metrics[f"{name}_mean_ms"] = float(np.mean(values))
    answered = [request for request in requests if not request.error]
    requested_tokens = sum(request.asked_output_tokens or 0 for request in answered)
    begin_s = min(request.scheduled_s for request in requests)
    span = max(times.token_times_s[-1] for times in timed) - begin_s
    steady = trace.last_arrival_s - begin_s
    tokens = sum(map(output_tokens, answered))
    metrics |= {
        "prompt_tokens": float(sum(map(prompt_tokens, answered))),
        "output_tokens": float(tokens),
        "seconds": float(span),
    }
    metrics |= {"asked_output_tokens": float(requested_tokens)} if requested_tokens else {}
    if len(timed) < ANSWERED * len(requests):
        return {name: float(value) for name, value in metrics.items()}
    metrics |= {"requests_per_s": len(timed) / span, "output_tokens_per_s": tokens / span}
    if steady >= 1.0:  # in less time, a few tokens would decide
        came = np.concatenate([times.token_times_s for item in trace.requests if (times := times_of(item))])
        in_steady_time = (begin_s <= came) & (came <= trace.last_arrival_s)
        metrics["steady_output_tokens_per_s"] = float(in_steady_time.sum() / steady)
    metrics |= tokens_a_step(trace)
    if limits:
        metrics["goodput_requests_per_s"] = sum(times.meets(limits) for times in timed) / span
    return {name: float(value) for name, value in metrics.items()}


def tokens_a_step(trace: Trace) -> dict[str, float]:
    """Computes the tokens per step of a decoding request, and the accepted share of drafted tokens.  With speculative
    decoding a request gets more than one token per step.  Only server steps without prompt tokens count.  The result is
    empty if the server does not report its steps."""
    steps = [step for step in trace.steps or () if step["num_decodes"] and not step["prompt_tokens"]]
    if not steps:
        return {}
    metrics = {"tokens_per_step": sum(step["tokens"] for step in steps) / sum(step["num_decodes"] for step in steps)}
    if drafted := sum(step.get("drafted", 0) for step in steps):
        metrics["acceptance"] = sum(sum(step["accepted"]) for step in steps) / drafted
    return metrics


def answers(trace: Trace) -> list[Times]:
    """Returns the times of the answered requests, without requests of the warm-up."""
    return [times for request in trace.counted if (times := times_of(request))]


def broken(trace: Trace) -> str:
    """Returns one sentence that says why the run gives no valid result, or an empty text if it is valid."""
    total, answered = len(trace.counted), len(answers(trace))
    reason = next(iter(failures(trace)), "none was sent")
    if not answered:
        return f"no request was answered: {reason}"
    if answered < ANSWERED * total:
        return f"{total - answered} of {total} requests failed, so that there are no rates; most often: {reason}"
    return ""


def remarks(trace: Trace) -> list[str]:
    """Returns sentences that warn a reader of the metrics about special properties of the answers."""
    requests = [request for request in trace.counted if times_of(request)]
    timed, total = answers(trace), f"of {len(requests)} answers"
    lengths = [(request.asked_output_tokens, output_tokens(request)) for request in requests]
    differing = [(asked, got) for asked, got in lengths if asked and asked != got]
    notes = []
    if differing:
        asked, got = (sum(counts) for counts in zip(*differing, strict=True))
        hint = "; the server does not keep ignore_eos" if trace.case.get("ignore_eos") and got < asked else ""
        notes += [f"{len(differing)} {total} have another length than asked: {asked:,} tokens asked, {got:,} got{hint}"]
    if spread := sum(times.counted == "spread" and times.tpot_ms is not None for times in timed):
        notes += [f"ITL and TPOT are spread evenly in {spread} {total}: no chunk says how many tokens it has"]
    if uncounted := sum(times.counted == "chunks" for times in timed):
        notes += [f"{uncounted} {total} have no usage: each chunk counts as one token"]
    if single := sum(times.tpot_ms is None for times in timed):
        notes += [f"{single} {total} came in one chunk: they have no ITL and no TPOT, and meet no limit on them"]
    if trace.unready:
        notes += [f"{trace.unready} prompts were made while the load ran: answers came faster than in the warm-up"]
    if trace.repeated:
        notes += [
            f"{trace.repeated} of {len(trace.requests)} requests repeat an earlier one: a prefix cache knows them"
        ]
    return notes


def failures(trace: Trace) -> dict[str, int]:
    """Counts the failed requests by reason, including the warm-up.  The most frequent reason comes first."""
    return dict(Counter(request.error for request in trace.requests if request.error).most_common())


def noise(trace: Trace) -> str:
    """Returns one sentence that says why the run is NOISY.  The sentence is empty if the run is not NOISY."""
    median_delay_ms = float(np.median(late_ms(trace.counted))) if trace.counted else 0.0
    return (
        f"the client sent half of the requests over {median_delay_ms:.2f} ms late; at most {LATE_MS:g} ms"
        if median_delay_ms > LATE_MS
        else ""
    )


def check_limits(texts: Sequence[str]) -> dict[str, float]:
    """Parses limits such as `ttft:500`, in milliseconds.  Raises `ValueError` on any other text."""

    def limit(name: str, value: str) -> float:
        if name not in LIMITS or not float(value) > 0:
            raise ValueError
        return float(value)

    expected = f"goodput: expected NAME:MILLISECONDS, once each of {', '.join(LIMITS)}"
    return values_by_name(texts, expected, limit, ":")

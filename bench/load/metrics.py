"""The metrics of a trace.

TTFT and E2E are taken twice: from the scheduled arrival and from the send.  If the client or its limit of concurrent
requests held a request back, only the first value shows the delay (coordinated omission).  ITL is per token: the gap
before a chunk of k tokens counts as k gaps of 1/k each, so chunks of several tokens do not inflate ITL.  The gaps
between chunks, as a user sees them, are reported too.
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
    """The times of one answered request, in milliseconds."""

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
        """Whether every limit in ms holds; a limit on `itl` must hold for each single gap.  A limit on a missing value
        does not hold: an answer in one chunk has no gap, however long its user waited for it."""
        measured = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        measured["itl"] = float(self.itl_ms.max()) if len(self.itl_ms) else None
        return all((value := measured[name]) is not None and value <= limit for name, limit in limits.items())


def token_steps(request: Request) -> tuple[list[list[tuple[float, float]]], str]:
    """For each answer of the request (`n`), the times and numbers of its tokens; and the way in which the numbers are
    known.  Text is never tokenised again to count tokens.

    `said`: the chunks give the numbers, by ids, log-probabilities or a running usage.  `one each`: each chunk has one
    token.  The usage then equals the number of chunks with text, or of all chunks (a token whose character is not
    complete has no text), or is higher by one per answer (a token that ends the text has no chunk).  A role, which may
    be sent at once, is no token.  `spread`: the usage is another number, and each chunk after the first gets the same
    share.  `chunks`: there is no usage, and each chunk with text counts as one token.
    """
    choices = [chunk for chunk in request.chunks if chunk.kind in ("text", "empty")]
    texts = [chunk for chunk in choices if chunk.kind == "text"]
    firsts = {chunk.answer: chunk for chunk in reversed(texts)}
    answers, total = len(firsts), request.output_tokens
    if texts and all(chunk.tokens is not None for chunk in texts):
        return _by_answer((chunk, float(chunk.tokens)) for chunk in choices if chunk.tokens), "said"
    if total is None:
        return _by_answer((chunk, 1.0) for chunk in texts), "chunks"
    for held in (texts, choices):
        if len(held) == total:
            return _by_answer((chunk, 1.0) for chunk in held), "one each"
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
    """The times of a request, or None if the request failed.  Gaps are taken only within one answer."""
    steps, counted = token_steps(request)
    if request.error or not steps:
        return None
    arrays = [np.array(answer).T for answer in steps]
    gaps = np.concatenate([1e3 * np.diff(times_s) for times_s, _ in arrays])
    behind = np.concatenate([tokens[1:] for _, tokens in arrays])
    times_s, tokens = np.concatenate(arrays, axis=1)
    first, last = times_s.min(), times_s.max()
    return Times(
        ttft_ms=1e3 * (first - request.scheduled_s),
        ttft_sent_ms=1e3 * (first - request.sent_s),
        e2e_ms=1e3 * (last - request.scheduled_s),
        e2e_sent_ms=1e3 * (last - request.sent_s),
        tpot_ms=float(gaps.sum() / behind.sum()) if len(gaps) else None,
        itl_ms=np.repeat(gaps / behind, np.maximum(1, np.rint(behind)).astype(int)),
        chunk_gap_ms=gaps,
        token_times_s=np.sort(np.repeat(times_s, np.maximum(1, np.rint(tokens)).astype(int))),
        counted=counted,
    )


def prompt_tokens(request: Request) -> int:
    """The number of prompt tokens by the usage; without a usage, the number with which the request was made."""
    return request.prompt_tokens or request.asked_prompt_tokens or 0


def output_tokens(request: Request) -> int:
    """The number of output tokens by the usage; without a usage, by the chunks."""
    return request.output_tokens or round(sum(tokens for answer in token_steps(request)[0] for _, tokens in answer))


def late_ms(requests: Sequence[Request]) -> np.ndarray:
    """The delay in ms of each send after the request was due and the limit let it go: the client's own delay."""
    return 1e3 * np.array([request.sent_s - request.free_s for request in requests])


def summarize(trace: Trace, limits: Mapping[str, float] | None = None) -> dict[str, float]:
    """The numbers of a run, without its warm-up; percentiles interpolate linearly, ITL is pooled over requests.

    `output_tokens_per_s` covers the time from the first arrival to the last token, including the cool-down.
    `steady_output_tokens_per_s` covers the time up to the last arrival, and also counts tokens of requests from the
    warm-up.  A run in which nearly all requests failed (`ANSWERED`) has no rates.
    """
    requests, timed = trace.counted, answers(trace)
    numbers = {"requests": float(len(requests)), "failed": float(len(requests) - len(timed))}
    if not timed:
        return numbers
    late, queued = late_ms(requests), [1e3 * (request.free_s - request.scheduled_s) for request in requests]
    pooled: dict[str, Sequence[float] | np.ndarray] = {
        name: [getattr(times, f"{name}_ms") for times in timed] for name in ("ttft", "ttft_sent", "e2e", "e2e_sent")
    }
    pooled["itl"], pooled["chunk_gap"] = (
        np.concatenate([getattr(times, f"{name}_ms") for times in timed]) for name in ("itl", "chunk_gap")
    )
    pooled["tpot"] = [times.tpot_ms for times in timed if times.tpot_ms is not None]
    pooled |= {"client_queue": queued, "client_late": late}
    for name, values in pooled.items():
        if len(values):
            numbers |= {f"{name}_p{q}_ms": float(np.percentile(values, q)) for q in (50, 90, 99)}
            numbers[f"{name}_mean_ms"] = float(np.mean(values))
    answered = [request for request in requests if not request.error]
    asked = sum(request.asked_output_tokens or 0 for request in answered)
    begin = min(request.scheduled_s for request in requests)
    span = max(times.token_times_s[-1] for times in timed) - begin
    steady = trace.last_arrival_s - begin
    tokens = sum(map(output_tokens, answered))
    numbers |= {
        "prompt_tokens": float(sum(map(prompt_tokens, answered))),
        "output_tokens": float(tokens),
        "seconds": float(span),
    }
    numbers |= {"asked_output_tokens": float(asked)} if asked else {}
    if len(timed) < ANSWERED * len(requests):
        return {name: float(value) for name, value in numbers.items()}
    numbers |= {"requests_per_s": len(timed) / span, "output_tokens_per_s": tokens / span}
    if steady >= 1.0:  # in less time, a few tokens would decide
        came = np.concatenate([times.token_times_s for item in trace.requests if (times := times_of(item))])
        within = (begin <= came) & (came <= trace.last_arrival_s)
        numbers["steady_output_tokens_per_s"] = float(within.sum() / steady)
    numbers |= tokens_a_step(trace)
    if limits:
        numbers["goodput_requests_per_s"] = sum(times.meets(limits) for times in timed) / span
    return {name: float(value) for name, value in numbers.items()}


def tokens_a_step(trace: Trace) -> dict[str, float]:
    """The tokens that a decoding request got per step, above 1 with speculation, and the accepted share of drafted
    tokens.  Counts the server's steps without prompts.  Empty if the server does not report its steps."""
    steps = [step for step in trace.steps or () if step["num_decodes"] and not step["prompt_tokens"]]
    if not steps:
        return {}
    numbers = {"tokens_per_step": sum(step["tokens"] for step in steps) / sum(step["num_decodes"] for step in steps)}
    if drafted := sum(step.get("drafted", 0) for step in steps):
        numbers["acceptance"] = sum(sum(step["accepted"]) for step in steps) / drafted
    return numbers


def answers(trace: Trace) -> list[Times]:
    """The times of the answered requests that do not belong to the warm-up."""
    return [times for request in trace.counted if (times := times_of(request))]


def broken(trace: Trace) -> str:
    """Why the run is not a result, in one sentence; empty if it is a result."""
    total, answered = len(trace.counted), len(answers(trace))
    reason = next(iter(failures(trace)), "none was sent")
    if not answered:
        return f"no request was answered: {reason}"
    if answered < ANSWERED * total:
        return f"{total - answered} of {total} requests failed, so that there are no rates; most often: {reason}"
    return ""


def remarks(trace: Trace) -> list[str]:
    """What a reader of the numbers should know about the answers, in sentences."""
    requests = [request for request in trace.counted if times_of(request)]
    timed, of = answers(trace), f"of {len(requests)} answers"
    lengths = [(request.asked_output_tokens, output_tokens(request)) for request in requests]
    other = [(asked, got) for asked, got in lengths if asked and asked != got]
    notes = []
    if other:
        asked, got = (sum(numbers) for numbers in zip(*other, strict=True))
        why = "; the server does not keep ignore_eos" if trace.case.get("ignore_eos") and got < asked else ""
        notes += [f"{len(other)} {of} have another length than asked: {asked:,} tokens asked, {got:,} got{why}"]
    if spread := sum(times.counted == "spread" and times.tpot_ms is not None for times in timed):
        notes += [f"ITL and TPOT are spread evenly in {spread} {of}: no chunk says how many tokens it has"]
    if uncounted := sum(times.counted == "chunks" for times in timed):
        notes += [f"{uncounted} {of} have no usage: each chunk counts as one token"]
    if single := sum(times.tpot_ms is None for times in timed):
        notes += [f"{single} {of} came in one chunk: they have no ITL and no TPOT, and meet no limit on them"]
    if trace.unready:
        notes += [f"{trace.unready} prompts were made while the load ran: answers came faster than in the warm-up"]
    if trace.repeated:
        notes += [
            f"{trace.repeated} of {len(trace.requests)} requests repeat an earlier one: a prefix cache knows them"
        ]
    return notes


def failures(trace: Trace) -> dict[str, int]:
    """The number of failed requests by reason, including the warm-up; the most frequent reason first."""
    return dict(Counter(request.error for request in trace.requests if request.error).most_common())


def noise(trace: Trace) -> str:
    """Why the run is NOISY, in one sentence; empty if it is not NOISY."""
    late = float(np.median(late_ms(trace.counted))) if trace.counted else 0.0
    return (
        f"the client sent half of the requests over {late:.2f} ms late; at most {LATE_MS:g} ms"
        if late > LATE_MS
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

"""Computes the latencies that a user sees, such as TTFT and ITL.  All times are from one clock (`perf_counter`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooflab.engine.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Describes a token that was delivered to the caller."""

    request_id: int
    index: int
    """The index of the token in the answer, from 0."""
    token_id: int
    time_s: float
    """The time at which the caller got the token, on the `perf_counter` clock."""
    text: str = ""
    """The text that this token completes."""
    output: RequestOutput | None = None
    """The whole result, which comes with the last token of a request; else None."""


@dataclass(frozen=True)
class Timeline:
    """Holds the times of one request, in seconds on the `perf_counter` clock."""

    arrival_s: float
    """The time at which the request was due."""
    token_times_s: tuple[float, ...]
    """The time at which each output token was delivered."""

    @property
    def ttft_ms(self) -> float:
        """Returns the time to first token: from the scheduled arrival to the delivery of the first token."""
        return 1e3 * (self.token_times_s[0] - self.arrival_s)

    @property
    def itl_ms(self) -> np.ndarray:
        """Returns the gaps between successive tokens (inter-token latencies), without the wait for the first token."""
        return 1e3 * np.diff(self.token_times_s)

    @property
    def tpot_ms(self) -> float | None:
        """Returns the time per output token, `(e2e - ttft) / (n - 1)` for `n` tokens, or None for a single token."""
        num_tokens = len(self.token_times_s)
        return None if num_tokens < 2 else (self.e2e_ms - self.ttft_ms) / (num_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        """Returns the time from the scheduled arrival to the delivery of the last token."""
        return 1e3 * (self.token_times_s[-1] - self.arrival_s)


@dataclass(frozen=True)
class Completion:
    """Holds one answer to a prompt.  The fields have vLLM's names."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None = None
    """For each token of the answer, the requested log-probabilities by token id.  The drawn token comes first."""


@dataclass(frozen=True)
class RequestOutput:
    """Holds the result of one prompt.  The keys `"text"` and `"token_ids"` give the first answer's text and tokens."""

    request_id: int
    prompt_token_ids: list[int]
    outputs: list[Completion]
    timeline: Timeline
    """The times of the first answer."""

    def __getitem__(self, key: str) -> Any:
        if key not in ("text", "token_ids", "finish_reason"):
            raise KeyError(f"expected 'text', 'token_ids' or 'finish_reason', got {key!r}")
        return getattr(self.outputs[0], key)


@dataclass(frozen=True)
class LatencySummary:
    """Summarises the latencies of requests.  ITL covers all gaps between tokens; TPOT has one value per request."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float | None
    """The median ITL; None if no request had two tokens."""
    itl_p90_ms: float | None
    itl_p99_ms: float | None
    tpot_mean_ms: float | None
    e2e_p50_ms: float
    output_tokens_per_s: float
    """The number of all output tokens, divided by the time from the first arrival to the last token."""


def summarize(timelines: Sequence[Timeline], num_prompt_tokens: int) -> LatencySummary:
    """Summarises the times of one or more finished requests.  Percentiles are interpolated linearly."""
    ttfts = [timeline.ttft_ms for timeline in timelines]
    token_gaps = np.concatenate([timeline.itl_ms for timeline in timelines])
    tpots = [tpot for timeline in timelines if (tpot := timeline.tpot_ms) is not None]
    itl_percentiles = [float(np.percentile(token_gaps, q)) if token_gaps.size else None for q in (50, 90, 99)]
    tokens = sum(len(timeline.token_times_s) for timeline in timelines)
    start_s = min(timeline.arrival_s for timeline in timelines)
    end_s = max(timeline.token_times_s[-1] for timeline in timelines)
    return LatencySummary(
        num_requests=len(timelines),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=tokens,
        ttft_p50_ms=float(np.percentile(ttfts, 50)),
        ttft_p90_ms=float(np.percentile(ttfts, 90)),
        ttft_p99_ms=float(np.percentile(ttfts, 99)),
        itl_p50_ms=itl_percentiles[0],
        itl_p90_ms=itl_percentiles[1],
        itl_p99_ms=itl_percentiles[2],
        tpot_mean_ms=float(np.mean(tpots)) if tpots else None,
        e2e_p50_ms=float(np.percentile([timeline.e2e_ms for timeline in timelines], 50)),
        output_tokens_per_s=tokens / (end_s - start_s),
    )

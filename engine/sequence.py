"""One request in the engine: its sampling parameters, tokens and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn; names and meanings are vLLM's.

    Raises `ValueError` on a value out of range.
    """

    max_tokens: int = 64
    """Most tokens to generate."""
    temperature: float = 0.0
    """0 takes the likeliest token (greedy)."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to and including the one whose cumulative probability reaches p."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the likeliest token's."""
    seed: int | None = None
    """Draws depend only on (seed, position); None derives a seed from the engine's seed and the request's number."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a finite number of at least 0, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k: expected 0 (off) to 2**31 - 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: expected a number in [0, 1], got {self.min_p}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: expected a number in [0, 2**63), got {self.seed}")


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine; compared by identity."""

    request_id: int
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_length: int
    """The largest number of tokens, prompt included."""
    arrival_s: float
    """When the request was due, on the `perf_counter` clock."""
    priority: int = 0
    """Smaller comes first."""
    num_computed: int = 0
    """How many of its tokens have keys and values in its pages; while it decodes, all but the last."""
    block_ids: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    """The numbers of the contents of its first pages, as `BlockManager` publishes them."""
    row: int = -1
    """Its row in the decode batch; -1 if it is not in the batch."""
    finish_reason: FinishReason | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Adds a generated token and sets `finish_reason` if it is the last."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"

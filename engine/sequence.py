"""Describes one request in the engine: its sampling parameters, tokens and pages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import UnionType
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from rooflab.engine.stopping import StopText

FinishReason = Literal["stop", "length", "abort"]
MOST_LOGPROBS = 20
"""OpenAI's limit of `top_logprobs`."""
LARGEST_FLOAT = float(np.finfo(np.float32).max)
"""The largest temperature and the largest bias of a request, because kernels take both in fp32."""
MODEL_SETTINGS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings for which a model may have its own values.  The values here leave the logits unchanged."""
PENALTY_RANGE = (1e-6, 1e6)
"""The bounds of `repetition_penalty`.  Within these bounds no logit of a model becomes infinite."""
_INTEGER_FIELDS = ("max_tokens", "min_tokens", "n", "top_k", "seed", "logprobs")
_OPTIONAL_FIELDS = (*MODEL_SETTINGS, "seed", "logprobs")
_VALUE_RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "n": (1, math.inf),
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**63 - 1),
    "logprobs": (0, MOST_LOGPROBS),
    "temperature": (0, LARGEST_FLOAT),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": PENALTY_RANGE,
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


@dataclass(frozen=True)
class SamplingParams:
    """Holds the sampling settings of one request.  Names and meanings are the same as in vLLM.

    If a field in `MODEL_SETTINGS` is None, the engine uses the model's own value (`engine/load/generation.py`).  Raises
    `ValueError` on a value out of range.
    """

    max_tokens: int = 64
    """The largest number of tokens to generate."""
    temperature: float | None = 0.0
    """0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Keep only the `top_k` likeliest tokens; 0 keeps all tokens."""
    top_p: float | None = None
    """Keep the likeliest tokens until their cumulative probability reaches `top_p`; 0 keeps the likeliest alone."""
    min_p: float | None = None
    """Keep tokens whose probability is at least this fraction of the likeliest token's."""
    seed: int | None = None
    """Draws depend only on `seed` and position.  None derives a seed from the engine's seed and the request id."""
    ignore_eos: bool = False
    """Whether the answer continues after an end-of-sequence token."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are left out of it."""
    min_tokens: int = 0
    """The least number of tokens before a stop text, a token of `stop_token_ids` or an end-of-sequence token counts."""
    n: int = 1
    """How many answers to draw."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers to add to the logits, by token id."""
    repetition_penalty: float | None = None
    """Divides the positive logits of tokens that the prompt or the answer has.  Multiplies their negative logits."""
    presence_penalty: float = 0.0
    """The number that is subtracted from the logits of tokens that the answer already has."""
    frequency_penalty: float = 0.0
    """The number that is subtracted from a token's logit once for each time that the answer already has the token."""
    logprobs: int | None = None
    """Return the log-probabilities of the drawn token and of this many likeliest tokens; None returns none of them."""

    @cached_property
    def penalised(self) -> bool:
        """Returns whether a penalty changes the logits of earlier tokens.  This is cached: every new token needs it."""
        return (self.repetition_penalty or 1, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @cached_property
    def plain(self) -> bool:
        """Returns whether tokens are drawn from unchanged logits and no log-probabilities are wanted."""
        return not (self.penalised or self.min_tokens or self.logit_bias or self.logprobs is not None)

    def __post_init__(self) -> None:
        for name, (min_value, max_value) in _VALUE_RANGES.items():
            value, is_integer = getattr(self, name), name in _INTEGER_FIELDS
            is_valid = _is(int if is_integer else int | float, value) and min_value <= value <= max_value
            if not is_valid and not (value is None and name in _OPTIONAL_FIELDS):
                type_name = "an integer" if is_integer else "a number"
                raise ValueError(f"{name}: expected {type_name} in [{min_value}, {max_value}], got {value!r}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop: expected texts that are not empty, got {self.stop!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: expected 0 to max_tokens, which is {self.max_tokens}, got {self.min_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n: expected 1 at temperature 0, where all answers are the same, got {self.n}")
        if not isinstance(self.stop_token_ids, Collection) or not all(_is(int, token) for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids: expected token ids, got {self.stop_token_ids!r}")
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            _is(int, token) and _is(int | float, value) and abs(value) <= LARGEST_FLOAT for token, value in bias.items()
        ):
            raise ValueError(f"logit_bias: expected finite numbers by token id, got {bias!r}")


def _is(kind: type | UnionType, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Holds one answer to a request in the engine.  Two sequences are equal only if they are the same object."""

    request_id: int
    token_ids: list[int]
    """The tokens of the prompt, then those of the answer."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_length: int
    """The largest number of tokens of the prompt and the answer together."""
    arrival_s: float
    """The time at which the request was due, on the `perf_counter` clock."""
    num_computed: int = 0
    """How many tokens have keys and values in the pages.  In decoding this is not updated: all but the last have."""
    unread: int = 0
    """1 while the host has not read the newest token from the device, else 0."""
    block_ids: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    """The numbers of the contents of the sequence's first pages, as `BlockManager` publishes them."""
    row: int = -1
    """The sequence's row in the decode batch; -1 if the sequence is not in the batch."""
    stopping: StopText | None = None
    """The search for the request's stop texts; None if there are no stop texts."""
    siblings: list[Sequence] = field(default_factory=list)
    """Other answers to the same prompt.  They are queued when the prompt is computed, and share its full pages."""
    counts: dict[int, int] = field(default_factory=dict)
    """How often the answer has each token.  With a repetition penalty, tokens that are only in the prompt have the
    count 0.  The counts are kept only for penalties."""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    """For each token of the answer, the requested log-probabilities by token id."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if (self.params.repetition_penalty or 1) != 1:
            self.counts.update(dict.fromkeys(self.token_ids, 0))

    def __len__(self) -> int:
        return len(self.token_ids) + self.unread

    @property
    def output_ids(self) -> list[int]:
        """Returns the tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Adds a generated token, and sets `finish_reason` if this token is the last."""
        self.token_ids.append(token_id)
        self.unread = 0
        if self.params.penalised:
            self.counts[token_id] = self.counts.get(token_id, 0) + 1
        has_stop_text = self.stopping is not None and self.stopping.push(token_id)
        if has_stop_text or token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"

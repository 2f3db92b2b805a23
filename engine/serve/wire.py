"""Defines the messages between the server's process and the engine's process.  ZeroMQ sends messages as pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rooflab.engine.sequence import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Submit:
    """Asks the engine to queue the prompts of a request."""

    prompts: dict[int, list[int]]
    """The token ids of each prompt, by the key that the server gave the prompt."""
    params: SamplingParams
    arrival_s: float
    """The time at which the server got the request, on `perf_counter`, which all processes of a Linux host share."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Asks the engine to drop all answers to the prompts `keys`."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """Asks the engine to turn the timing of each op on or off."""

    on: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Asks the engine's process to end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Tells the server that the model is loaded, with the model's sizes and the kernels in use."""

    model: str
    """The name of the model's architecture."""
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    kernels: list[dict[str, str]]
    """The kernels that serve, as rows of `OpSet.describe`."""


@dataclass(frozen=True, slots=True)
class ModelNotLoaded:
    """Tells the server that the model cannot be loaded, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Queued:
    """Tells the server that the engine has queued all prompts of a request, or has refused the request."""

    key: int
    """The key of the request's first prompt."""
    refusal: str = ""
    """Why the engine cannot serve one of the prompts: `argument: what was wanted, what came`."""


class Token(NamedTuple):
    """Describes one token of an answer."""

    key: int
    answer: int
    """The number of the answer among the answers to the prompt."""
    token_id: int
    finish_reason: FinishReason | None
    """The reason for the answer's end, given with the last token; None with other tokens."""
    logprobs: Mapping[int, float] | None
    """The requested log-probabilities by token id, the drawn token's first."""


class Started(NamedTuple):
    """Describes the start of a prompt: the first step that computes tokens of the prompt."""

    key: int
    time_s: float
    """The time at which the step began."""
    cached_tokens: int
    """The number of prompt tokens that were already in the KV cache."""


@dataclass(frozen=True, slots=True)
class State:
    """Holds the numbers of sequences and pages between two steps."""

    running: int = 0
    waiting: int = 0
    pages_held: int = 0
    pages_shared: int = 0
    """The number of pages that several sequences hold."""
    pages_cached: int = 0
    """The number of pages that no sequence holds and whose content may be used again."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """Describes the work of one step, and its times."""

    number: int
    begin_s: float
    end_s: float
    num_decodes: int
    """The number of decoding sequences.  A step gives each of them a token."""
    decode_keys: int
    """The number of keys that the decoding sequences attended to, summed over all these sequences."""
    prompt_tokens: int
    """The number of prompt tokens that were computed."""
    prompt_pairs: int
    """The number of query-key pairs of the prompt tokens.  A token attends to itself and all tokens before it."""
    tokens: int
    """The number of answer tokens that the step gave."""
    preempted: int
    """The number of sequences that lost their pages."""
    evicted: int
    """The number of pages of the prefix cache that were given away."""
    running: int
    """The number of answers in the batch after the step."""
    waiting: int
    """The number of answers that wait for the batch after the step."""
    waited: float | None
    """The time that the engine's threads waited for a core, divided by the time that they ran; None on a GPU."""
    ops_s: Mapping[str, float] = field(default_factory=dict)
    """The seconds of each op.  Filled only while somebody watches and the engine runs on a CPU."""
    drafts: int = 0
    """The number of sequences with a draft that the step verified."""
    drafted: int = 0
    """The number of tokens of all drafts in the step."""
    accepted: list[int] = field(default_factory=list)
    """For each position in a draft, the number of tokens accepted there.  Empty without drafts."""
    draft_s: float = 0.0
    """The seconds of a step's three parts: `draft_s` chooses sequences and drafts, `verify_s` runs the model, and
    `accept_s` gives the tokens to the sequences."""
    verify_s: float = 0.0
    accept_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stepped:
    """Tells the server the result of a step, or that requests were dropped between two steps."""

    state: State
    step: StepLine | None = None
    tokens: tuple[Token, ...] = ()
    started: tuple[Started, ...] = ()


ToEngine = Submit | Abort | Watch | Stop
FromEngine = Ready | ModelNotLoaded | Queued | Stepped

"""The messages between the server's process and the engine's, which are pickled and sent by ZeroMQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rooflab.engine.sequence import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Submit:
    """Queues the prompts of a request."""

    prompts: dict[int, list[int]]
    """The token ids of each prompt, by the server's key."""
    params: SamplingParams
    arrival_s: float
    """When the server got it, on the `perf_counter` clock, which is one for all processes of a Linux host."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Drops the answers to these prompts."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """Turns the timing of each op on or off."""

    on: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the engine's process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded: its sizes, and the kernels that serve."""

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
    """The kernels that serve, as `OpSet.describe` has them."""


@dataclass(frozen=True, slots=True)
class ModelNotLoaded:
    """The model cannot be loaded, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Queued:
    """The engine has queued the prompts of a request, or none."""

    key: int
    """The key of the first prompt."""
    refusal: str = ""
    """Why it cannot serve one of them: `argument: what was wanted, what came`."""


class Token(NamedTuple):
    """A token of an answer."""

    key: int
    answer: int
    """The number of the answer among those to the prompt."""
    token_id: int
    finish_reason: FinishReason | None
    """The reason for the answer's end, with its last token; else None."""
    logprobs: Mapping[int, float] | None
    """The log-probabilities that were asked for, by token, the drawn one first."""


class Started(NamedTuple):
    """The first step with tokens of a prompt."""

    key: int
    time_s: float
    """The time at which the step began."""
    cached_tokens: int
    """Tokens of the prompt that were in the KV cache."""


@dataclass(frozen=True, slots=True)
class State:
    """The numbers of sequences and pages between two steps."""

    running: int = 0
    waiting: int = 0
    pages_held: int = 0
    pages_shared: int = 0
    """Pages that several sequences hold."""
    pages_cached: int = 0
    """Pages that no sequence holds, and whose content may be used again."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """The work of one step, and its times."""

    number: int
    begin_s: float
    end_s: float
    num_decodes: int
    """Sequences that got a token each without a prompt."""
    decode_keys: int
    """Keys that these sequences attended to, summed over them."""
    prompt_tokens: int
    """Tokens of prompts that were computed."""
    prompt_pairs: int
    """Query-key pairs of these tokens, each with itself and all before it."""
    tokens: int
    """Tokens of answers that came out of the step."""
    preempted: int
    """Sequences that lost their pages."""
    evicted: int
    """Pages of the prefix cache that were given away."""
    running: int
    """Answers in the batch behind the step."""
    waiting: int
    """Answers that wait for the batch behind the step."""
    waited: float | None
    """The time that the engine's threads waited for a core, over the time that they ran; None on a GPU."""
    ops_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each op, while somebody watches and the engine runs on a CPU."""
    drafts: int = 0
    """Sequences of which a draft was verified."""
    drafted: int = 0
    """Tokens of these drafts."""
    accepted: list[int] = field(default_factory=list)
    """For each place of a draft how many tokens were accepted there; empty without drafts."""
    draft_s: float = 0.0
    """The parts of a step with drafts: the choice of requests and their drafts, the model's run, and what becomes of
    its tokens."""
    verify_s: float = 0.0
    accept_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stepped:
    """The message after a step, or after requests were dropped between steps."""

    state: State
    step: StepLine | None = None
    tokens: tuple[Token, ...] = ()
    started: tuple[Started, ...] = ()


ToEngine = Submit | Abort | Watch | Stop
FromEngine = Ready | ModelNotLoaded | Queued | Stepped

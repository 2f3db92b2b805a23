"""Defines the fields of a request: the fields of OpenAI's API, and some fields of vLLM.

Names, types and ranges are the same as in OpenAI's API reference.  An unsupported field must be null, false or empty.
`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids` and `ignore_eos` come from vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rooflab.engine.load.tokenizer import Prompt
from rooflab.engine.sequence import MOST_LOGPROBS, PENALTY_RANGE, SamplingParams

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""
MOST_ANSWERS = 128
MOST_STOP_TEXTS = 4
MOST_STOP_CHARACTERS = 1024
MOST_STOP_IDS = 128
MOST_BIASES = 300
"""The most entries of `logit_bias`, as in OpenAI's API.  With 49,152 entries a step took 57 ms for all its requests."""
MOST_PROMPTS = 2048
MOST_MESSAGES = 2048
MOST_PARTS = 128
MOST_IDS = 2**17
"""The most tokens of a prompt that is given by ids, for any model.  The ids are checked on the event loop, in 7 ms."""

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
_SAME = "temperature top_p min_p n min_tokens ignore_eos repetition_penalty presence_penalty frequency_penalty".split()
"""Fields that have the same meaning in `SamplingParams`.  Null means the default of `SamplingParams`."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Label = Annotated[str, Field(max_length=512)]
TokenIds = Annotated[list[TokenId], Field(max_length=MOST_IDS, fail_fast=True)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias], Field(max_length=MOST_BIASES, fail_fast=True)
]


class Strict(BaseModel):
    """Refuses unknown fields, values of the wrong type, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, data: Any) -> Any:
        """Removes unknown fields from a request, except one that causes an error, because there may be a million. Null,
        false or empty unknown fields cause no error, because OpenAI's client sends many (`model_dump()`)."""
        fields = cls.__pydantic_fields__
        if not isinstance(data, dict) or data.keys() <= fields.keys():
            return data
        off_values: tuple[Any, ...] = (None, False, "", [], {})
        bad_field = next((name for name, value in data.items() if name not in fields and value not in off_values), None)
        return {name: value for name, value in data.items() if name in fields or name == bad_field}


class Asked(NamedTuple):
    """Holds the fields that have different names in a completion request and a chat request."""

    field: str
    prompts: Sequence[Prompt]
    """The prompts, which are the value of the field named `field`."""
    most_field: str
    most: int | None
    """The most tokens of an answer, which is the value of the field named `most_field`."""
    default: int | None
    """The most tokens of an answer if `most` is None.  None stands for all tokens that the context holds."""
    logprobs: int | None


class StreamOptions(Strict):
    """Selects what a stream contains in addition to the tokens."""

    include_usage: bool = False
    """Whether the stream has a last event with the numbers of tokens."""
    continuous_usage_stats: bool = False
    """Whether every event has the numbers of tokens so far, as in vLLM."""


class Sampling(Strict):
    """Defines the fields that completion requests and chat requests have in common."""

    model: Label
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOP_TEXTS, fail_fast=True)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Keep only the `top_k` likeliest tokens; 0 and -1 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=PENALTY_RANGE[0], le=2)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="after")
    def _options_of_streams(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected only with stream=true")
        return self

    def params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Returns the request's settings for the engine.  Raises `ValueError` on settings that cannot be combined."""
        settings = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{"temperature": None, **settings},
            max_tokens=max_tokens,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            seed=None if self.seed is None else self.seed % 2**63,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logit_bias={int(token): value for token, value in self.logit_bias.items()} if self.logit_bias else None,
            logprobs=logprobs,
        )


class CompletionRequest(Sampling):
    """Describes the body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MOST_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None

    def asked(self) -> Asked:
        """Returns the request's prompts, its limit of new tokens, and its number of log-probabilities per token."""
        is_single = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if is_single else self.prompt
        return Asked("prompt", prompts, "max_tokens", self.max_tokens, COMPLETION_TOKENS, self.logprobs)


class TextPart(Strict):
    """Describes a part of a message's content.  Only parts of the type `text` are supported."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """Describes a message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)] | None
    """The text, or its parts.  Only an assistant's message may have None."""
    name: Label | None = None
    id: Label | int | None = None
    """A field without effect.  It is accepted because clients send back the messages that they keep."""

    @model_validator(mode="after")
    def _some_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("expected content, got null")
        return self

    def plain(self) -> dict[str, str]:
        """Returns the message in the format that chat templates expect."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(text_part.text for text_part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ChatRequest(Sampling):
    """Describes the body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def asked(self) -> Asked:
        """Returns the messages, the length limit and the log-probabilities.  Completions have other names for them."""
        name, max_tokens = "max_completion_tokens", self.max_completion_tokens
        if max_tokens is None:
            name, max_tokens = "max_tokens", self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return Asked("messages", [[message.plain() for message in self.messages]], name, max_tokens, None, logprobs)

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected only with logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_completion_tokens: expected only one of it and max_tokens")
        return self


class TokenizeRequest(Strict):
    """Describes the body of `POST /tokenize`: a text or a chat."""

    model: Label | None = None
    prompt: str | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: expected either prompt or messages")
        return self

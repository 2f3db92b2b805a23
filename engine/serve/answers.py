"""The bodies of completions and chats, made from tokens: whole, or in events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflab.engine.load.tokenizer import Texts
from rooflab.engine.sequence import SamplingParams
from rooflab.engine.serve.wire import Token
from rooflab.engine.stopping import StopText


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The text and the log-probabilities that a token adds to an answer."""

    index: int
    """The answer's `index`."""
    text: str
    """The text that it completes, which may be empty."""
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class BodyFormat(ABC):
    """The bodies of one kind of request."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, texts: Texts, model: str):
        self.texts = texts
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    @staticmethod
    def of(piece: AnswerPiece, **body: Any) -> dict[str, Any]:
        """An answer whose text is in `body`."""
        return {"index": piece.index, **body, "logprobs": piece.logprobs, "finish_reason": piece.finish_reason}

    @abstractmethod
    def choice(self, piece: AnswerPiece) -> dict[str, Any]:
        """An answer in a whole body."""

    @abstractmethod
    def delta(self, piece: AnswerPiece) -> dict[str, Any]:
        """An answer in an event."""

    @abstractmethod
    def shown(self, offset: int, token: int, logprobs: Mapping[int, float], n: int) -> dict[str, Any]:
        """The log-probabilities of the drawn `token` and of the `n` likeliest; it begins at `offset` of the answer's
        text, of which a stop text that ends it would be a part."""

    @staticmethod
    def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The log-probabilities of an answer from those of its tokens: lists are joined."""
        lists = (name for name, value in parts[0].items() if isinstance(value, list))
        return parts[0] | {name: [value for part in parts for value in part[name]] for name in lists}

    def first(self, index: int) -> dict[str, Any] | None:
        """The choice of the event before an answer's first token; None if there is no such event."""
        return None

    def whole(self, choices: list[dict[str, Any]], usage: Mapping[str, Any]) -> bytes:
        """The body of a reply without a stream."""
        return _json({**self._head, "object": self.object, "choices": choices, "usage": usage})

    def event(self, choices: list[dict[str, Any]], **usage: Any) -> bytes:
        """An event of a stream."""
        body = {**self._head, "object": self.chunk_object, "choices": choices, **usage}
        return b"data: %b\n\n" % _json(body)


class CompletionBody(BodyFormat):
    """`POST /v1/completions`."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def choice(self, piece: AnswerPiece) -> dict[str, Any]:
        """Returns the choice with this piece of text."""
        return self.of(piece, text=piece.text)

    delta = choice

    def shown(self, offset: int, token: int, logprobs: Mapping[int, float], n: int) -> dict[str, Any]:
        """Returns them in the form of a completion; the drawn token is always there, so there may be `n` + 1."""
        top: dict[str, float] = {}
        for each, value in logprobs.items() if n else ():
            name = self.texts.named(each)[0]
            top[f"token_id:{each}" if name in top else name] = value  # two tokens may have one text
        return {
            "tokens": [self.texts.named(token)[0]],
            "token_logprobs": [logprobs[token]],
            "top_logprobs": [top or None],
            "text_offset": [offset],
        }


class Chat(BodyFormat):
    """`POST /v1/chat/completions`."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any] | None:
        """The choice with the role, which comes before the first token."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, piece: AnswerPiece) -> dict[str, Any]:
        """Returns the choice with this piece as the whole message."""
        return self.of(piece, message={"role": "assistant", "content": piece.text, "refusal": None})

    def delta(self, piece: AnswerPiece) -> dict[str, Any]:
        """Returns the choice with this piece as a part of the message."""
        return self.of(piece, delta={"content": piece.text})

    def shown(self, offset: int, token: int, logprobs: Mapping[int, float], n: int) -> dict[str, Any]:
        """Returns the log-probabilities in the form of a chat."""
        drawn, *others = (self._one(each, value) for each, value in logprobs.items())
        # Where the drawn token is one of the likeliest, it is not there twice.
        top = others if len(logprobs) > n else sorted([drawn, *others], key=lambda entry: -entry["logprob"])
        return {"content": [{**drawn, "top_logprobs": top}], "refusal": None}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        name, piece = self.texts.named(token)
        return {"token": name, "logprob": value, "bytes": list(piece)}


class Answer:
    """One answer as its tokens come: its text ends before a stop text."""

    def __init__(self, format: BodyFormat, params: SamplingParams, index: int):
        self.index = index
        self.count = 0
        """The number of tokens so far."""
        self._format = format
        self._stream = format.texts.stream()
        self._stopping = StopText(params.stop, self._stream, params.min_tokens)
        self._n = params.logprobs or 0

    def push(self, token: Token) -> AnswerPiece:
        """Adds `token`, and returns the piece that is new with it."""
        self.count += 1
        last = token.finish_reason is not None
        text = self._stopping.piece(token.token_id, last)
        shown = None
        if token.logprobs is not None:
            shown = self._format.shown(self._stream.begin, token.token_id, token.logprobs, self._n)
        return AnswerPiece(self.index, text, token.finish_reason, shown)

    def cut(self) -> AnswerPiece:
        """The end of an answer that was broken off."""
        self._stopping.end()
        return AnswerPiece(self.index, self._stopping.take(last=True), "abort", None)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()

"""Builds the bodies of completions and chats from tokens, as whole bodies or as events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflab.engine.load.tokenizer import Texts
from rooflab.engine.sequence import SamplingParams
from rooflab.engine.serve.wire import Token
from rooflab.engine.stopping import StopText


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Holds the text and the log-probabilities that a token adds to an answer."""

    index: int
    """The answer's `index`."""
    text: str
    """The text that the token completes.  It may be empty."""
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class CompletionBody:
    """Builds the reply bodies of `POST /v1/completions`.  Those of chats differ in some methods."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, texts: Texts, model: str):
        self.texts = texts
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    @staticmethod
    def of(piece: AnswerPiece, **body: Any) -> dict[str, Any]:
        """Returns the `choices` entry for `piece`.  `body` holds the entry's other fields, such as the text."""
        return {"index": piece.index, **body, "logprobs": piece.logprobs, "finish_reason": piece.finish_reason}

    def choice(self, piece: AnswerPiece) -> dict[str, Any]:
        """Returns the `choices` entry with the text of `piece`."""
        return self.of(piece, text=piece.text)

    delta = choice

    def shown(self, offset: int, token: int, logprobs: Mapping[int, float], n: int) -> dict[str, Any]:
        """Returns the log-probabilities of the drawn `token` and of the `n` likeliest tokens.  `offset` is the token's
        position in the answer's text, which here includes the stop text."""
        logprob_of: dict[str, float] = {}
        for token_id, logprob in logprobs.items() if n else ():
            name = self.texts.named(token_id)[0]
            logprob_of[f"token_id:{token_id}" if name in logprob_of else name] = logprob  # two tokens may have one text
        return {
            "tokens": [self.texts.named(token)[0]],
            "token_logprobs": [logprobs[token]],
            "top_logprobs": [logprob_of or None],
            "text_offset": [offset],
        }

    @staticmethod
    def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merges the log-probability dictionaries of an answer's tokens into one.  Joins their lists in token order."""
        list_names = (name for name, body_value in parts[0].items() if isinstance(body_value, list))
        return parts[0] | {name: [body_value for piece in parts for body_value in piece[name]] for name in list_names}

    def first(self, index: int) -> dict[str, Any] | None:
        """Returns the `choices` entry of the event that comes before all tokens, or None if there is no such event."""
        return None

    def whole(self, choices: list[dict[str, Any]], usage: Mapping[str, Any]) -> bytes:
        """Returns the body of a reply that is not a stream."""
        return _json({**self._head, "object": self.object, "choices": choices, "usage": usage})

    def event(self, choices: list[dict[str, Any]], **usage: Any) -> bytes:
        """Returns one event of a stream."""
        body = {**self._head, "object": self.chunk_object, "choices": choices, **usage}
        return b"data: %b\n\n" % _json(body)


class Chat(CompletionBody):
    """Builds the reply bodies of `POST /v1/chat/completions`."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any] | None:
        """Returns the `choices` entry with the role.  Its event comes before the event of the first token."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, piece: AnswerPiece) -> dict[str, Any]:
        """Returns the `choices` entry with the text of `piece` as the whole message."""
        return self.of(piece, message={"role": "assistant", "content": piece.text, "refusal": None})

    def delta(self, piece: AnswerPiece) -> dict[str, Any]:
        """Returns the `choices` entry with the text of `piece` as one part of the message."""
        return self.of(piece, delta={"content": piece.text})

    def shown(self, offset: int, token: int, logprobs: Mapping[int, float], n: int) -> dict[str, Any]:
        """Returns the log-probabilities in the format of chat completions."""
        token_entry, *entries = (self._one(token_id, logprob) for token_id, logprob in logprobs.items())
        # Where the drawn token is one of the likeliest, it is not there twice.
        top = entries if len(logprobs) > n else sorted([token_entry, *entries], key=lambda entry: -entry["logprob"])
        return {"content": [{**token_entry, "top_logprobs": top}], "refusal": None}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        name, token_bytes = self.texts.named(token)
        return {"token": name, "logprob": value, "bytes": list(token_bytes)}


class Answer:
    """Builds one answer while its tokens arrive.  The answer's text ends before a stop text."""

    def __init__(self, format: CompletionBody, params: SamplingParams, index: int):
        self.index = index
        self.count = 0
        """The number of tokens that have arrived."""
        self._format = format
        self._stream = format.texts.stream()
        self._stopping = StopText(params.stop, self._stream, params.min_tokens)
        self._n = params.logprobs or 0

    def push(self, token: Token) -> AnswerPiece:
        """Adds `token`.  Returns the new text and the log-probabilities of the token."""
        self.count += 1
        is_last = token.finish_reason is not None
        text = self._stopping.piece(token.token_id, is_last)
        logprobs = None
        if token.logprobs is not None:
            logprobs = self._format.shown(self._stream.begin, token.token_id, token.logprobs, self._n)
        return AnswerPiece(self.index, text, token.finish_reason, logprobs)

    def cut(self) -> AnswerPiece:
        """Ends an answer that was aborted, and returns its last piece."""
        self._stopping.end()
        return AnswerPiece(self.index, self._stopping.take(last=True), "abort", None)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()

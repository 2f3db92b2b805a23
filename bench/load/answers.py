"""What an answer's bytes say: events of a stream, and the chunks in them, each with its time."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rooflab.bench.load.client import Shot
from rooflab.bench.load.trace import Chunk, Request

LINE_END = re.compile(rb"\r\n|\n|\r")
SHOWN = 200
"""Most characters of a server's message in a reason."""


def events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """The data of each server-sent event with the time at which its last byte came, by the WHATWG's rules.

    Lines end with CR, LF or both, a line that begins with a colon is a comment, and an empty line ends an event.  Data
    without an empty line behind it counts too: servers that close the connection leave it out.
    """
    body, ends = b"".join(data for _, data in pieces), list(accumulate(len(data) for _, data in pieces))
    data: list[bytes] = []
    at = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    while at < len(body):
        found = LINE_END.search(body, at)
        line, end = (body[at : found.start()], found.end()) if found else (body[at:], len(body))
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        if data and (not line or end == len(body)):
            last = found.start() if found else end - 1
            yield pieces[bisect_right(ends, last)][0], b"\n".join(data).decode(errors="replace")
            data = []
        at = end


def read_answer(shot: Shot) -> Request:
    """The trace of one request.  It has failed if its `error` is not empty."""
    known = _Known()
    error = shot.error
    if shot.status not in (0, 200):
        error = f"HTTP {shot.status}: {_message(b''.join(data for _, data in shot.pieces).decode(errors='replace'))}"
    elif not error or error == "connection dropped":
        for time_s, text in events(shot.pieces):
            if found := known.take(time_s, text):
                error = error or found
        if not error and not known.reason and not known.done:
            error = "the stream ended with no finish_reason and no [DONE]"
        if not error and not known.tokens_seen:
            error = "the answer has no token"
    return Request(
        index=shot.index,
        scheduled_s=shot.scheduled_s,
        free_s=shot.free_s,
        sent_s=shot.scheduled_s if shot.sent_s is None else shot.sent_s,
        first_byte_s=shot.pieces[0][0] if shot.pieces else None,
        end_s=shot.end_s,
        chunks=known.counted(),
        asked_prompt_tokens=shot.prompt_tokens,
        asked_output_tokens=shot.output_tokens,
        prompt_tokens=known.prompt_tokens,
        output_tokens=known.output_tokens,
        finish_reason=known.reason,
        error=error,
    )


class _Known:
    """What the events so far have said."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.totals: list[int | None] = []
        """For each chunk the tokens of the answer so far, if it tells."""
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.reason: str | None = None
        self.done = False

    @property
    def tokens_seen(self) -> bool:
        return any(chunk.kind == "text" or chunk.tokens for chunk in self.chunks) or bool(self.output_tokens)

    def take(self, time_s: float, text: str) -> str:
        """Adds an event; returns why the request has failed by it, or an empty text."""
        if text.strip() == "[DONE]":
            self.done = True
            return self._add(Chunk(time_s, "done"))
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            return f"an event is no JSON object: {text[:40]!r}"
        if event.get("error"):
            return f"an error in the stream: {_message(text)}"
        total = None
        if isinstance(usage := event.get("usage"), dict):
            total = usage.get("completion_tokens")
            self.output_tokens = self.output_tokens if total is None else total
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        choice = next(iter(event.get("choices") or ()), None)
        if choice is None:
            return self._add(Chunk(time_s, "usage")) if total is not None else ""
        self.reason = choice.get("finish_reason") or self.reason
        delta = choice.get("delta") or {}
        shown = [choice.get("text"), *(delta.get(key) for key in ("content", "reasoning_content", "reasoning"))]
        if any(shown) or delta.get("tool_calls"):
            kind = "text"
        else:
            kind = "role" if delta.get("role") else "empty"
        return self._add(Chunk(time_s, kind, _listed(choice)), total)

    def _add(self, chunk: Chunk, total: int | None = None) -> str:
        self.chunks.append(chunk)
        self.totals.append(total)
        return ""

    def counted(self) -> tuple[Chunk, ...]:
        """The chunks; where each with text says the total so far, with the differences as their tokens.

        A total that only the last of several chunks has is that of the answer, and says nothing about the chunk.
        """
        texts = [total for chunk, total in zip(self.chunks, self.totals, strict=True) if chunk.kind == "text"]
        if len(texts) < 2 or None in texts:
            return tuple(self.chunks)
        found, before = [], 0
        for chunk, total in zip(self.chunks, self.totals, strict=True):
            if total is not None and chunk.kind != "usage":
                chunk, before = chunk._replace(tokens=total - before), total
            found.append(chunk)
        return tuple(found)


def _listed(choice: Mapping[str, Any]) -> int | None:
    """The tokens of a chunk by the ids or the log-probabilities in it; None if it has neither."""
    if isinstance(ids := choice.get("token_ids"), list):
        return len(ids)
    logprobs = choice.get("logprobs")
    listed = (logprobs.get("tokens") or logprobs.get("content")) if isinstance(logprobs, dict) else None
    return len(listed) if isinstance(listed, list) and listed else None


def _message(text: str) -> str:
    """The message in an error of OpenAI's form, else the text's beginning."""
    try:
        value = json.loads(text)
        error = value.get("error", value)
        text = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:SHOWN] or "no reason given"

"""Parses the bytes of a streamed answer into server-sent events and chunks of text, with their arrival times."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from rooflab.bench.load.client import Shot
from rooflab.bench.load.http import DROPPED_ERROR
from rooflab.bench.load.metrics import token_steps
from rooflab.bench.load.trace import Request, StreamEvent

LINE_END = re.compile(rb"\r\n|\n|\r")
MESSAGE_LENGTH = 200
"""The most characters of a server's message that a reason quotes."""
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")
"""The fields of a chat's delta that may contain the text of a token."""
ABORT_REASONS = ("abort", "error", "cancelled")
"""The finish reasons of an answer that the server ended early."""
MAX_TOKENS = 1 << 24
"""The most tokens of an answer."""


ERROR_PREFIXES = (b"error:", b'{"error"')
"""How a line begins that has an error but no `data:`: from llama.cpp, and from a proxy that passes on a body."""


def events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str, bool]]:
    """Yields the server-sent events of a stream: arrival time of the last byte, data, and whether it is an error event.

    Parsing follows the WHATWG standard.  Lines end with CR, LF or both, and an empty line ends an event.  The last
    empty line may be missing, because some servers omit it.  Events without data are skipped."""
    body, end_offsets = b"".join(data for _, data in pieces), list(accumulate(len(data) for _, data in pieces))
    data, is_error = list[bytes](), False
    offset = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    while offset < len(body):
        line_end = LINE_END.search(body, offset)
        line, next_start = (body[offset : line_end.start()], line_end.end()) if line_end else (body[offset:], len(body))
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(ERROR_PREFIXES):
            data, is_error = [line.removeprefix(b"error:")], True
        elif line.startswith(b"event:"):
            is_error = line[6:].strip() == b"error"
        if not line or next_start == len(body):
            end_byte = line_end.start() if line_end else next_start - 1
            if (event_data := b"\n".join(data)).strip() or is_error:
                yield pieces[bisect_right(end_offsets, end_byte)][0], event_data.decode(errors="replace"), is_error
            data, is_error = [], False
        offset = next_start


def read_answer(shot: Shot) -> Request:
    """Converts a sent request and its answer (`shot`) to a request of the trace.  `error` says why a request failed."""
    state = _AnswerState()
    error = shot.error
    if shot.status not in (0, 200):
        error = f"HTTP {shot.status}: {_message(b''.join(data for _, data in shot.pieces).decode(errors='replace'))}"
    elif not error or error == DROPPED_ERROR:
        for time_s, event_text, is_error in events(shot.pieces):
            failure = f"an error in the stream: {_message(event_text)}" if is_error else state.take(time_s, event_text)
            if failure:
                error = error or failure
            if failure or state.done:  # what follows is no part of the answer
                break
        if error == DROPPED_ERROR and state.done:  # all parts that its user waits for had come
            error = ""
        if not error and not state.done and not all(state.reasons.values() or [None]):
            error = "the stream ended with no finish_reason and no [DONE]"
        if not error and (abort_reasons := [reason for reason in state.reasons.values() if reason in ABORT_REASONS]):
            error = f"the server cut the answer: finish_reason {abort_reasons[0]!r}"
    request = Request(
        index=shot.index,
        scheduled_s=shot.scheduled_s,
        sent_s=shot.scheduled_s if shot.sent_s is None else shot.sent_s,
        first_byte_s=shot.pieces[0][0] if shot.pieces else None,
        end_s=shot.end_s,
        chunks=state.counted(),
        asked_prompt_tokens=shot.prompt_tokens,
        asked_output_tokens=shot.output_tokens,
        prompt_tokens=state.prompt_tokens,
        output_tokens=state.output_tokens,
        finish_reason=next(filter(None, state.reasons.values()), None),
        error=error,
    )
    if error or token_steps(request)[0]:
        return request
    usage_text = f", and its usage says {request.output_tokens}" if request.output_tokens else ""
    return replace(request, error=f"the answer has no token{usage_text}")


class _AnswerState:
    """Holds the chunks and token counts of one answer while its events are parsed one by one."""

    def __init__(self) -> None:
        self.chunks: list[StreamEvent] = []
        self.totals: list[int | None] = []
        """For each chunk, the number of tokens so far; None if the chunk does not give the number."""
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.reasons: dict[int, str | None] = {}
        """By index of an answer of the request, its finish reason."""
        self.done = False

    def take(self, time_s: float, text: str) -> str:
        """Parses one event and stores its chunks.  Returns the reason if the request has failed, else ""."""
        if text.strip() == "[DONE]":
            self.done = True
            return self._add(StreamEvent(time_s, "done"))
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            return f"an event is no JSON: {text[:40]!r}"
        if isinstance(event, dict) and (event.get("error") or "error" in (event.get("object"), event.get("type"))):
            return f"an error in the stream: {_message(text)}"
        if not _is_chunk(event):
            return f"an event is no chunk of an answer: {text[:40]!r}"
        usage = event.get("usage") or {}
        token_total = usage.get("completion_tokens")
        self.output_tokens = self.output_tokens if token_total is None else token_total
        self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
        choices = event.get("choices") or ()
        if choice_errors := [choice["error"] for choice in choices if choice.get("error")]:
            return f"an error in the stream: {_message(choice_errors[0])}"
        for choice in choices:
            self._choice(time_s, choice, token_total if len(choices) == 1 else None)
        return "" if choices or token_total is None else self._add(StreamEvent(time_s, "usage"))

    def _choice(self, time_s: float, choice: Mapping[str, Any], total: int | None) -> None:
        answer_index = choice.get("index") or 0
        self.reasons[answer_index] = choice.get("finish_reason") or self.reasons.get(answer_index)
        choice_delta = choice.get("delta") or {}
        if choice.get("text") or any(choice_delta.get(name) for name in TEXT_FIELDS):
            kind = "text"
        elif choice_delta.get("role"):  # sent at once: it has no token, whatever it says
            kind, total = "role", None
        else:
            kind = "empty"
        self._add(StreamEvent(time_s, kind, None if kind == "role" else _listed(choice), answer_index), total)

    def _add(self, chunk: StreamEvent, total: int | None = None) -> str:
        self.chunks.append(chunk)
        self.totals.append(total)
        return ""

    def counted(self) -> tuple[StreamEvent, ...]:
        """Returns the chunks of all answers to the request, each with its number of tokens if this number is known.

        Some servers send a running total of tokens with each chunk.  Then a chunk has the difference of two totals.
        Totals are ignored if they are incomplete, begin with 0, decrease, or count several answers together."""
        chunk_totals = list(zip(self.chunks, self.totals, strict=True))
        tokens_by_answer: dict[int, int] = {}
        for answer in self.reasons:
            answer_totals = [total for chunk, total in chunk_totals if chunk.answer == answer and total is not None]
            texts = [total for chunk, total in chunk_totals if chunk.answer == answer and chunk.kind == "text"]
            if len(answer_totals) < 2 or None in texts or not any(texts[:1]) or answer_totals != sorted(answer_totals):
                return tuple(self.chunks)
            tokens_by_answer[answer] = answer_totals[-1]
        if len(tokens_by_answer) > 1 and sum(tokens_by_answer.values()) != self.output_tokens:
            return tuple(self.chunks)
        previous_totals = dict.fromkeys(tokens_by_answer, 0)
        for chunk_index, (chunk, total) in enumerate(chunk_totals):
            if total is not None:
                self.chunks[chunk_index] = chunk._replace(tokens=total - previous_totals[chunk.answer])
                previous_totals[chunk.answer] = total
        return tuple(self.chunks)


def _is_chunk(event: Any) -> bool:
    """Tells whether an event is a chunk of a streamed answer. A field must have the right type, be null or missing."""

    def has(where: Any, name: str, kind: type) -> bool:
        return where.get(name) is None or isinstance(where[name], kind)

    if not isinstance(event, dict) or not has(event, "choices", list) or not has(event, "usage", dict):
        return False
    usage, choices = event.get("usage") or {}, event.get("choices") or ()
    token_counts = [usage[name] for name in ("prompt_tokens", "completion_tokens") if usage.get(name) is not None]
    return all(type(token_count) is int and 0 <= token_count < MAX_TOKENS for token_count in token_counts) and all(
        isinstance(choice, dict)
        and has(choice, "delta", dict)
        and has(choice, "finish_reason", str)
        and has(choice, "index", int)
        for choice in choices
    )


def _listed(choice: Mapping[str, Any]) -> int | None:
    """Counts the tokens of a chunk by its token ids or its log-probabilities. Returns None if the chunk has neither."""
    if isinstance(token_ids := choice.get("token_ids"), list):
        return len(token_ids)
    logprobs = choice.get("logprobs")
    tokens = (logprobs.get("tokens") or logprobs.get("content")) if isinstance(logprobs, dict) else None
    return len(tokens) if isinstance(tokens, list) and tokens else None


def _message(error_body: Any) -> str:
    """Returns the message of a server error in OpenAI's format. For another format, returns the text's beginning."""
    try:
        parsed_body = json.loads(error_body) if isinstance(error_body, str) else error_body
        error = parsed_body.get("error", parsed_body)
        error_body = error.get("message") or error if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(str(error_body).encode(errors="replace").decode().split())[:MESSAGE_LENGTH] or "no reason given"

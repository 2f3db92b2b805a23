"""Handles one request while the engine works on it: queues its prompts, and builds its answers token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from rooflab.engine.sequence import SamplingParams
from rooflab.engine.serve.answers import Answer, AnswerPiece, CompletionBody
from rooflab.engine.serve.client import Call, Engine, EngineDied, Inbox
from rooflab.engine.serve.errors import TIMED_OUT, ApiError

MAX_SILENCE_S = 15.0
"""Seconds that a stream may be silent while prompts wait or run.  Proxies close a silent stream after 30 to 60 s."""


class RequestWork:
    """Handles the prompts of one request, each as a `Call`.  `open` queues them; `close` drops unfinished prompts."""

    def __init__(self, engine: Engine, format: CompletionBody, deadline_s: float):
        self.format = format
        self.calls: list[Call] = []
        self._engine = engine
        self._deadline_s = deadline_s
        """The time on the event loop's clock at which the request times out."""
        self._inbox = Inbox()
        self._answers: dict[tuple[int, int], Answer] = {}

    async def open(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *about: Any) -> None:
        """Queues `prompts`; `about` goes to `Engine.submit`. If one is refused, queues none and raises `ValueError`."""
        self.calls = await self._engine.submit(prompts, params, self._inbox, *about)
        answer_keys = ((call.key, answer_index) for call in self.calls for answer_index in range(params.n))
        self._answers = {answer_key: Answer(self.format, params, i) for i, answer_key in enumerate(answer_keys)}

    def close(self) -> None:
        """Drops the request's unfinished prompts from the engine. The code that reads the generator `events` must call
        this at the end. The generator cannot do it: if nobody reads from a generator, none of its code runs."""
        self._engine.drop(self.calls)

    @property
    def usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens so far, with OpenAI's names.  A prompt with several answers counts once."""
        prompt = sum(call.prompt_tokens for call in self.calls)
        completion_tokens = sum(answer.count for answer in self._answers.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(call.cached_tokens for call in self.calls)},
        }

    async def pieces(self) -> AsyncGenerator[list[AnswerPiece], None]:
        """Yields lists of answer pieces until every answer has ended.  Unfinished answers are cut off at the deadline,
        or when the server ends.  Yields an empty list after each `MAX_SILENCE_S` seconds without a token.

        Raises `EngineDied` if the engine ends."""
        event_loop, open_answers = asyncio.get_running_loop(), dict(self._answers)
        while open_answers:
            try:
                async with asyncio.timeout_at(min(self._deadline_s, event_loop.time() + MAX_SILENCE_S)):
                    arrived_tokens = await self._inbox.get()
            except TimeoutError:
                if event_loop.time() < self._deadline_s and not self._engine.ending:
                    yield []
                    continue
                self.close()
                yield [answer.cut() for answer in open_answers.values()]
                return
            pieces = []
            for call, token in arrived_tokens:
                pieces.append(self._answers[call.key, token.answer].push(token))
                if token.finish_reason is not None:
                    del open_answers[call.key, token.answer]
            yield pieces

    async def events(self, include_usage: bool, continuous: bool) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream, one per token.  A chat's role comes in an event before the first of them."""
        seen_answers: set[int] = set()
        usage_field: dict[str, Any] = {"usage": None} if include_usage else {}
        try:
            async for pieces in self.pieces():
                events = []
                for piece in pieces:
                    if continuous:
                        usage_field["usage"] = self.usage
                    if piece.index not in seen_answers and (first_choice := self.format.first(piece.index)):
                        events.append(self.format.event([first_choice], **usage_field))
                    seen_answers.add(piece.index)
                    events.append(self.format.event([self.format.delta(piece)], **usage_field))
                yield b"".join(events) or b": \n\n"  # a comment
            if include_usage:
                yield self.format.event([], usage=self.usage)
            yield b"data: [DONE]\n\n"
        except EngineDied as error:
            yield ApiError(500, str(error)).event()

    async def whole(self) -> bytes:
        """Returns the body of a reply that is not a stream.  A second thread builds the body, outside the event loop.

        Raises `EngineDied` if the engine ends, and `ApiError` with status 408 if the request times out."""
        pieces_by_answer: dict[int, list[AnswerPiece]] = {}
        async for pieces in self.pieces():
            for piece in pieces:
                pieces_by_answer.setdefault(piece.index, []).append(piece)
        if not self._engine.ending and any(answer[-1].finish_reason == "abort" for answer in pieces_by_answer.values()):
            raise ApiError(*TIMED_OUT)
        return await asyncio.to_thread(self._body, pieces_by_answer)

    def _body(self, texts: Mapping[int, Sequence[AnswerPiece]]) -> bytes:
        choices = [self.format.choice(self._joined(texts[answer_index])) for answer_index in sorted(texts)]
        return self.format.whole(choices, self.usage)

    def _joined(self, pieces: Sequence[AnswerPiece]) -> AnswerPiece:
        piece_logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        logprobs = self.format.joined(piece_logprobs) if piece_logprobs else None
        return AnswerPiece(pieces[0].index, "".join(piece.text for piece in pieces), pieces[-1].finish_reason, logprobs)

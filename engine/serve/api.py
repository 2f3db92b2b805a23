"""Defines the HTTP routes of the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from rooflab.engine.load.tokenizer import Prompt, Texts, is_chat
from rooflab.engine.serve.answers import Chat, CompletionBody
from rooflab.engine.serve.client import Engine, EngineDied
from rooflab.engine.serve.counters import Counters
from rooflab.engine.serve.errors import TIMED_OUT, ApiError, ErrorReply, of_validation
from rooflab.engine.serve.limits import Guard, Limits
from rooflab.engine.serve.requests import Asked, ChatRequest, CompletionRequest, TokenizeRequest
from rooflab.engine.serve.streams import EventStream, while_there
from rooflab.engine.serve.work import RequestWork

EVENT_INTERVAL_S = 0.1
"""Seconds between two events for the server's page."""
MAX_EVENT_STEPS = 200
"""The most lines of steps in one event.  They are written in one turn of the event loop, which takes 2 ms."""
TOO_LONG_CODE = "context_length_exceeded"
_STATUS_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": HTTPStatus(status).phrase}
    for status in (400, 401, 404, 408, 413, 415, 429, 500, 503)
}
_STREAM_REPLY: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}, "application/json": {}}}}


class ServedModel(BaseModel):
    """Describes a served model in the reply of `GET /v1/models`."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "rooflab"
    max_model_len: int


class Models(BaseModel):
    """Describes the reply of `GET /v1/models`, which lists one model."""

    object: str = "list"
    data: list[ServedModel]


class Tokens(BaseModel):
    """Describes the reply of `POST /tokenize`, with the same fields as in vLLM."""

    count: int
    max_model_len: int
    tokens: list[int]


class Service:
    """Answers requests with one engine.  Holds the model's name, its tokenizer, the server's limits and web pages."""

    def __init__(self, engine: Engine, texts: Texts, model: str, limits: Limits):
        self.engine, self.texts, self.model, self.limits = engine, texts, model, limits
        self.pages = {"/": Path(__file__).with_name("page.html").read_text(encoding="utf-8")}
        self.draining = False
        """Whether new requests are refused because the server is about to end."""
        self.created, engine_info = int(time.time()), engine.info
        self.context = min(engine_info.max_model_len, engine_info.num_blocks * engine_info.block_size)
        """The most tokens of a prompt and its answer together."""
        self._places, self._opening = engine_info.max_num_seqs + limits.max_queue, 0
        """The most answers in the engine; and the number of admitted answers that are not in the engine yet."""
        self.counters = Counters(engine, model)
        engine.observe, engine.gap = self.counters.stepped, self.counters.gap
        engine.ended.append(self.counters.ended)
        self._encoder = ThreadPoolExecutor(1, "encode")  # one: a tokenizer may not be used by two threads at once

    async def encode(self, prompt: Prompt, param: str) -> list[int]:
        """Returns the prompt's token ids, computed by a second thread. Raises `ApiError` about the field `param` if the
        prompt cannot be encoded. A prompt that is clearly too long for the context is refused before encoding."""
        content: Any = prompt
        min_tokens = sum(len(message["content"]) for message in content) if is_chat(content) else len(content)
        if isinstance(content, str) or is_chat(content):
            min_tokens //= self.texts.longest
        if min_tokens >= self.context:
            raise self._too_long(param, f"at least {min_tokens}")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, self.texts.encode, prompt)
        except ValueError as error:
            raise ApiError(400, f"{param}: {str(error).partition(': ')[2]}", param) from error

    def admit(self, model: str, answers: int) -> None:
        """Raises `ApiError` if the server cannot take a request for `answers` answers now."""
        if model != self.model:
            raise ApiError(
                404, f"The model `{model}` does not exist; this server has `{self.model}`", "model", "model_not_found"
            )
        if self.draining or self.engine.died.is_set():
            raise ApiError(503, "the server is about to end", code="shutting_down")
        if answers > self._places:
            raise ApiError(400, f"n: expected at most {self._places} answers, n for each prompt, got {answers}", "n")
        num_answers = self._opening + sum(call.params.n for call in self.engine.calls.values())
        if num_answers + answers > self._places:
            raise ApiError(
                429,
                f"{num_answers} answers are in the engine and {answers} more were asked for; at most"
                f" {self._places} may be there",
                code="queue_full",
            )

    def _too_long(self, param: str, tokens: str) -> ApiError:
        error_text = f"{param}: expected fewer tokens than the context, which has {self.context}, got {tokens}"
        return ApiError(400, error_text, param, TOO_LONG_CODE)

    def most_tokens(self, asked: Asked, longest_prompt: int) -> int:
        """Returns the most tokens of an answer.  Raises `ApiError` if the request asks for more, or if none fits."""
        tokens_left = self.context - longest_prompt
        max_tokens = tokens_left if self.limits.max_tokens is None else min(tokens_left, self.limits.max_tokens)
        if tokens_left < 1:
            raise self._too_long(asked.field, str(longest_prompt))
        if asked.most is not None and asked.most > max_tokens:
            error_code = TOO_LONG_CODE if asked.most > tokens_left else None
            raise ApiError(
                400,
                f"{asked.most_field}: expected at most {max_tokens} behind a prompt of {longest_prompt}"
                f" tokens, got {asked.most}",
                asked.most_field,
                error_code,
            )
        return asked.most if asked.most is not None else min(asked.default or max_tokens, max_tokens)

    async def answer(self, request: Request, body: CompletionRequest | ChatRequest, format: CompletionBody) -> Response:
        """Returns the reply to a request: a stream of events, or one whole body."""
        event_loop, arrival_s = asyncio.get_running_loop(), request.state.arrival_s
        deadline_s = event_loop.time() + self.limits.timeout_s - (time.perf_counter() - arrival_s)
        handler = RequestWork(self.engine, format, deadline_s)
        request_fields = body.asked()
        num_answers, trace_parent = len(request_fields.prompts) * (body.n or 1), request.headers.get("traceparent")

        async def begin() -> None:
            self.admit(body.model, num_answers)
            self._opening += num_answers
            async with asyncio.timeout_at(deadline_s):
                try:
                    ids = [await self.encode(prompt, request_fields.field) for prompt in request_fields.prompts]
                    params = body.params(self.most_tokens(request_fields, max(map(len, ids))), request_fields.logprobs)
                finally:
                    self._opening -= num_answers  # from here on they are the engine's, or there are none
                await handler.open(ids, params, arrival_s, trace_parent)

        try:
            await while_there(request.receive, begin())
        except ValueError as error:
            param, separator, _ = str(error).partition(":")  # the engine's sentences begin with the argument
            raise ApiError(400, str(error), param if separator and param.isidentifier() else None) from error
        except TimeoutError as error:
            raise ApiError(*TIMED_OUT) from error
        reply: Response
        if body.stream:
            options = body.stream_options
            usage, every_event = (options.include_usage, options.continuous_usage_stats) if options else (False, False)
            reply = EventStream(handler.events(usage, every_event), handler.close)
        else:
            try:
                reply = Response(await while_there(request.receive, handler.whole()), media_type="application/json")
            finally:
                handler.close()
        return reply

    async def live(self) -> AsyncGenerator[bytes, None]:
        """Yields ten events per second for the web page: the engine's state, and the steps since the last event."""
        engine, engine_info = self.engine, self.engine.info
        last_step = engine.steps[-1].number if engine.steps else 0
        engine.watch(True)
        try:
            yield _event({"info": {"name": self.model, **asdict(engine_info)}})
            while not (engine.died.is_set() or engine.ending):
                new_steps = []
                for step_line in islice(reversed(engine.steps), MAX_EVENT_STEPS):  # more, where its reader was slow
                    if step_line.number <= last_step:
                        break
                    new_steps.append(asdict(step_line))
                last_step = new_steps[0]["number"] if new_steps else last_step
                yield _event({"state": asdict(engine.state), "steps": new_steps[::-1]})
                await asyncio.sleep(EVENT_INTERVAL_S)
        finally:
            engine.watch(False)


def make_app(service: Service, hosts: list[str] | None = None, alone: bool = True) -> FastAPI:
    """Makes the FastAPI application.  With `hosts`, the Host header of a request must name one of these hosts.

    `alone=False` means that several replicas share the address, so the web page, steps and metrics have no routes."""
    app = FastAPI(
        title="Rooflab", description="OpenAI's completions and chats, by Rooflab's engine.", responses=_STATUS_RESPONSES
    )
    _handle_errors(app)
    _add_openai(app, service)
    _add_own(app, service)
    if alone:
        _add_views(app, service)
    app.add_middleware(Guard, limits=service.limits, hosts=hosts, alone=alone)
    if service.limits.origins:  # around the guard: a browser asks first, and without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.limits.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_STREAM_REPLY)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.answer(request, body, CompletionBody(service.texts, service.model))

    @app.post("/v1/chat/completions", responses=_STREAM_REPLY)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.answer(request, body, Chat(service.texts, service.model))

    def served() -> ServedModel:
        return ServedModel(id=service.model, created=service.created, max_model_len=service.engine.info.max_model_len)

    @app.get("/v1/models")
    async def models() -> Models:
        return Models(data=[served()])

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> ServedModel:
        if model != service.model:
            raise ApiError(404, f"The model `{model}` does not exist", "model", "model_not_found")
        return served()


def _add_own(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        has_messages = body.messages is not None
        prompt = [message.plain() for message in body.messages or ()] if has_messages else body.prompt or ""
        token_ids = await service.encode(prompt, "messages" if has_messages else "prompt")
        return Tokens(count=len(token_ids), max_model_len=engine.info.max_model_len, tokens=token_ids)

    @app.get("/health")
    async def health() -> dict[str, str]:
        engine.check()
        if service.draining:
            raise ApiError(503, "the server is about to end")
        return {"status": "ok"}


def _add_views(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.counters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/steps")
    async def steps() -> Response:
        def body() -> str:
            step_lines = ", ".join(json.dumps(asdict(step_line), allow_nan=False) for step_line in list(engine.steps))
            return f'{{"now_s": {time.perf_counter()}, "steps": [{step_lines}]}}'

        return Response(await asyncio.to_thread(body), media_type="application/json")

    @app.get("/live", response_class=Response)
    async def live() -> Response:
        return EventStream(service.live(), lambda: None)

    for path, page in service.pages.items():
        app.router.routes.append(Route(path, HTMLResponse(page), methods=["GET"], include_in_schema=False))


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        retry_header = {"retry-after": "1"}
        headers = {408: {"x-should-retry": "false"}, 429: retry_header, 503: {**retry_header, "connection": "close"}}
        return error.reply(headers.get(error.status))  # OpenAI's client would repeat what took too long

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes):  # it was not taken for JSON
            content_type = repr(request.headers.get("content-type"))[:80]
            return ApiError(415, f"content-type: expected 'application/json', got {content_type}").reply()
        return of_validation(error.errors()).reply()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        status_phrase = HTTPStatus(error.status_code).phrase
        message = status_phrase if error.detail == status_phrase else f"{status_phrase}: {error.detail}"
        return ApiError(error.status_code, message).reply(dict(error.headers or {}))

    @app.exception_handler(EngineDied)
    async def died(request: Request, error: EngineDied) -> Response:
        return ApiError(503, str(error)).reply()

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it


def _event(body: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(body, allow_nan=False).encode()

"""The routes of the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from rooflab.engine.serve.answers import Chat, Completion, Format
from rooflab.engine.serve.client import Engine, EngineDied
from rooflab.engine.serve.counters import Counters
from rooflab.engine.serve.errors import ApiError, ErrorReply, of_engine, of_status, of_validation
from rooflab.engine.serve.limits import Guard, Limits
from rooflab.engine.serve.requests import ChatRequest, CompletionRequest, Sampling, TokenizeRequest
from rooflab.engine.serve.streams import EventStream, while_there
from rooflab.engine.serve.texts import Texts
from rooflab.engine.serve.work import Work
from rooflab.engine.tokenizer import Prompt

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""
LIVE_S = 0.1
"""How often the page hears of the engine."""
SLOW_READER_S = 60.0
"""How long after its deadline a stream may still be read."""
PAGE = Path(__file__).with_name("page.html")
_STATUSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": HTTPStatus(status).phrase}
    for status in (400, 401, 404, 408, 413, 429, 500, 503)
}
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}, "application/json": {}}}}
TraceParent = Annotated[str | None, Header()]


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "rooflab"
    max_model_len: int


class Models(BaseModel):
    """All models that are served: one."""

    object: str = "list"
    data: list[Model]


class Tokens(BaseModel):
    """The reply of `POST /tokenize`, as vLLM's."""

    count: int
    max_model_len: int
    tokens: list[int]


class Service:
    """One engine behind one name, with its tokenizer and its limits."""

    def __init__(self, engine: Engine, texts: Texts, model: str, limits: Limits):
        self.engine, self.texts, self.model, self.limits = engine, texts, model, limits
        self.draining = False
        """Whether new requests are refused, because the server is about to end."""
        self.created = int(time.time())
        self.counters = Counters(engine, model)
        engine.observe = self.counters.stepped
        engine.ended = self.counters.ended
        self._encoder = ThreadPoolExecutor(1, "encode")  # one: a tokenizer may not be used by two threads at once

    async def encode(self, prompt: Prompt, param: str) -> list[int]:
        """Token ids, made beside the event loop.  Raises `ApiError` with `param` on a prompt that has none."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, self.texts.encode, prompt)
        except ValueError as error:
            raise ApiError(400, f"{param}: {str(error).partition(': ')[2]}", param) from error

    def admit(self, model: str, answers: int) -> None:
        """Raises `ApiError` unless the server takes a request for so many answers now."""
        if model != self.model:
            raise ApiError(404, f"The model `{model}` does not exist; this server has `{self.model}`", "model",
                           "model_not_found")  # fmt: skip
        if self.draining or self.engine.died.is_set():
            raise ApiError(503, "the server is about to end", code="shutting_down")
        there = sum(call.params.n for call in self.engine.calls.values())
        most = self.engine.info.max_num_seqs + self.limits.max_queue
        if there + answers > most:
            raise ApiError(429, f"{there} answers are in the engine and {answers} more were asked for; at most {most}"
                           " may be there", code="queue_full")  # fmt: skip

    def most_tokens(self, asked: int | None, param: str, default: int | None, longest_prompt: int) -> int:
        """The limit of an answer.  Raises `ApiError` if more was asked for than can be."""
        room = self.engine.info.max_model_len - longest_prompt
        most = room if self.limits.max_tokens is None else min(room, self.limits.max_tokens)
        if most < 1:
            raise ApiError(400, f"prompt: expected fewer tokens than the context, which has"
                           f" {self.engine.info.max_model_len}, got {longest_prompt}", "prompt")  # fmt: skip
        if asked is not None and asked > most:
            raise ApiError(400, f"{param}: expected at most {most} behind a prompt of {longest_prompt} tokens, got"
                           f" {asked}", param)  # fmt: skip
        return asked if asked is not None else min(default or most, most)

    async def answer(
        self,
        request: Request,
        body: Sampling,
        format: Format,
        prompts: list[list[int]],
        max_tokens: int,
        logprobs: int | None,
    ) -> Response:
        """The reply to a request: a stream of events, or one body."""
        loop = asyncio.get_running_loop()
        try:
            params = body.params(max_tokens, logprobs)
            work = Work(self.engine, format, loop.time() + self.limits.timeout_s)
            parent = request.headers.get("traceparent")
            arrival_s: float = request.state.arrival_s
            await while_there(request.receive, work.open(prompts, params, arrival_s, body.priority or 0, parent))
        except ValueError as error:
            raise of_engine(error) from error
        headers = {"x-request-id": format.id}
        if not body.stream:
            return JSONResponse(await while_there(request.receive, work.whole()), headers=headers)
        options = body.stream_options
        usage, continuous = (options.include_usage, options.continuous_usage_stats) if options else (False, False)
        return EventStream(work.events(usage, continuous), self.limits.timeout_s + SLOW_READER_S, headers)

    async def live(self) -> AsyncGenerator[bytes, None]:
        """The engine for the page, ten times a second: its state and the steps since the last event."""
        engine, info = self.engine, self.engine.info
        seen = engine.steps[-1].number if engine.steps else 0
        engine.watch(True)
        try:
            yield _event({"info": {"name": self.model, **asdict(info)}})
            while not engine.died.is_set():
                fresh = []
                for line in reversed(engine.steps):
                    if line.number <= seen:
                        break
                    fresh.append(asdict(line))
                seen = fresh[0]["number"] if fresh else seen
                yield _event({"state": asdict(engine.state), "steps": fresh[::-1]})
                await asyncio.sleep(LIVE_S)
        finally:
            engine.watch(False)


def make_app(service: Service, hosts: list[str] | None = None, alone: bool = True) -> FastAPI:
    """The application; with `hosts`, a request must name one of them in its Host header.

    One that is not `alone` behind its address has no page, no steps and no metrics: of which replica would they be?
    """
    app = FastAPI(
        title="Rooflab", description="OpenAI's completions and chats, by Rooflab's engine.", responses=_STATUSES
    )
    _handle_errors(app)
    _add_openai(app, service)
    _add_own(app, service)
    if alone:
        _add_views(app, service)
    app.add_middleware(Guard, limits=service.limits)
    if hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_STREAM)
    async def completions(body: CompletionRequest, request: Request, traceparent: TraceParent = None) -> Response:
        prompts = body.prompts()
        service.admit(body.model, len(prompts) * (body.n or 1))
        ids = [await service.encode(prompt, "prompt") for prompt in prompts]
        most = service.most_tokens(body.max_tokens, "max_tokens", COMPLETION_TOKENS, max(map(len, ids)))
        return await service.answer(request, body, Completion(service.texts, service.model), ids, most, body.logprobs)

    @app.post("/v1/chat/completions", responses=_STREAM)
    async def chat(body: ChatRequest, request: Request, traceparent: TraceParent = None) -> Response:
        service.admit(body.model, body.n or 1)
        ids = await service.encode([message.plain() for message in body.messages], "messages")
        asked, name = body.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, name = body.max_tokens, "max_tokens"
        most = service.most_tokens(asked, name, None, len(ids))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return await service.answer(request, body, Chat(service.texts, service.model), [ids], most, logprobs)

    def own() -> Model:
        return Model(id=service.model, created=service.created, max_model_len=service.engine.info.max_model_len)

    @app.get("/v1/models")
    async def models() -> Models:
        return Models(data=[own()])

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Model:
        if model != service.model:
            raise ApiError(404, f"The model `{model}` does not exist", "model", "model_not_found")
        return own()


def _add_own(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        chat = body.messages is not None
        prompt = [message.plain() for message in body.messages or ()] if chat else body.prompt or ""
        ids = await service.encode(prompt, "messages" if chat else "prompt")
        return Tokens(count=len(ids), max_model_len=engine.info.max_model_len, tokens=ids)

    @app.get("/health")
    async def health() -> dict[str, str]:
        if engine.died.is_set() or service.draining:
            raise ApiError(503, "the engine has ended" if engine.died.is_set() else "the server is about to end")
        return {"status": "ok"}


def _add_views(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.counters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/steps")
    async def steps() -> dict[str, Any]:
        return {"now_s": time.perf_counter(), "steps": [asdict(line) for line in engine.steps]}

    @app.get("/live", response_class=Response)
    async def live() -> Response:
        return EventStream(service.live(), None)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.reply({"retry-after": "1"} if error.status in (429, 503) else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return of_validation(error.errors()).reply()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return of_status(error.status_code, error.detail).reply(dict(error.headers or {}))

    @app.exception_handler(EngineDied)
    async def died(request: Request, error: EngineDied) -> Response:
        return ApiError(503, str(error)).reply()

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it


def _event(body: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(body).encode()

"""Starts the engine and the HTTP server, and ends both without losing an answer."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import sys
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOL_SOCKET
from socket import socket as Socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rooflab.engine.load.model_files import path_of
from rooflab.engine.load.tokenizer import Numbers, Texts, Tokenizer
from rooflab.engine.serve.api import Service, make_app
from rooflab.engine.serve.client import Engine, EngineDied
from rooflab.engine.serve.errors import ApiError
from rooflab.engine.serve.extras.tracing import exporter
from rooflab.engine.serve.limits import Limits
from rooflab.roofline.numbers import counted

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHUTDOWN_WAIT_S = 4.0
"""Seconds that a reader gets at the server's end, to read what was already written."""
SLOW_READER_S = 60.0
"""If a connection's buffer is full and its reader takes nothing, the connection is closed after this many seconds."""


class ClientConnection(H11Protocol):
    """An HTTP connection of uvicorn.  A request must arrive within `receive_s` seconds.  Errors have OpenAI's format.

    On a 2-core Xeon, the parser h11 takes about 0.2 ms more CPU time per request than httptools, and 5 us more per
    event. But httptools limits no headers, and loses the body of requests that offer HTTP/2 (as Java's client does)."""

    def __init__(self, *arguments: Any, receive_s: float, **named: Any):
        super().__init__(*arguments, **named)
        self._receive_s = receive_s
        self._late = self.loop.call_later(receive_s, self._too_late)

    def data_received(self, data: bytes) -> None:
        """Overrides uvicorn's method.  Stops the timer of a request when the whole request has arrived."""
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):  # the request is there
            self._late.cancel()
        elif self._late.cancelled():
            self._late = self.loop.call_later(self._receive_s, self._too_late)

    def pause_writing(self) -> None:
        """Overrides uvicorn's method.  Starts a timer that closes the connection if the reader stays slow."""
        super().pause_writing()
        self._slow = self.loop.call_later(SLOW_READER_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Overrides uvicorn's method.  Stops the timer, because the reader reads again."""
        super().resume_writing()
        self._slow.cancel()

    def send_400_response(self, msg: str) -> None:
        """Sends the text of the exception that uvicorn is handling (from h11).  This text says more than `msg`."""
        http_error = sys.exception()
        http_status = http_error.error_status_hint if isinstance(http_error, h11.RemoteProtocolError) else 400
        self._refuse(ApiError(http_status, f"http: {http_error}"[:100]))

    def _should_upgrade(self) -> bool:
        return False

    def _too_late(self) -> None:
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._refuse(ApiError(408, f"the request did not arrive in {self._receive_s:g} s", code="timeout"))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else it has a reply
            error_reply = error.reply({"connection": "close"})
            reply_head = h11.Response(
                status_code=error.status, headers=error_reply.raw_headers, reason=HTTPStatus(error.status).phrase
            )
            for reply_part in (reply_head, h11.Data(data=bytes(error_reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(reply_part) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Runs an engine's uvicorn server. After SIGTERM or SIGINT it refuses new requests, and ends after the last answer.

    A second signal ends the server at once."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float, url: str, say: Callable[[str], None]):
        super().__init__(config)
        self._service, self._drain_s, self._url, self._say = service, drain_s, url, say
        self._until_s = math.inf
        """The time on the event loop's clock at which the server stops waiting for answers."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuses new requests at the first signal, and ends the server at the second.  Uvicorn calls this."""
        self.should_exit, self._service.draining = self._service.draining, True

    async def startup(self, sockets: list[Socket] | None = None) -> None:
        """Starts to listen for connections.  Uvicorn calls this method at its start."""
        await super().startup(sockets)
        self._say(f"{self._url} answers; SIGTERM or Ctrl-C ends it")

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to end the server.  Uvicorn calls this ten times a second."""
        engine, now_s = self._service.engine, asyncio.get_running_loop().time()
        if self._service.draining:
            if self._until_s == math.inf and engine.calls:
                wait_text = f"waiting up to {self._drain_s:g} s for {counted(len(engine.calls), 'answer')}"
                self._say(f"{wait_text}; a second signal ends at once")
            self._until_s = min(self._until_s, now_s + self._drain_s)
            self.should_exit |= not engine.calls or now_s >= self._until_s
        return await super().on_tick(counter) or engine.died.is_set()

    async def shutdown(self, sockets: list[Socket] | None = None) -> None:
        """Ends all prompts in the engine and waits for the replies to end.  Uvicorn calls this last."""

        def hang_up() -> None:
            for open_connection in list(self.server_state.connections):
                open_connection.transport.abort()

        self._service.draining = True
        self._service.engine.cut()
        asyncio.get_running_loop().call_later(SHUTDOWN_WAIT_S, hang_up)
        await super().shutdown(sockets)


def bound(host: str, port: int) -> Socket:
    """Binds a socket to `host` and `port` for this process alone.  Raises `ValueError` if the port is taken."""
    socket = Socket(AF_INET6 if ":" in host else AF_INET)
    socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    try:
        socket.bind((host, port))
        # With it, a second server could have the address until one listens, and both would load their models.
        socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 0)
    except OSError as error:
        socket.close()
        raise ValueError(f"port: cannot listen on {host}:{port}: {error.strerror}") from error
    return socket


def url_of(host: str, port: int) -> str:
    """Returns the URL of a server at `host` and `port`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def service_of(engine: Engine, options: Mapping[str, Any], name: str | None, limits: Limits) -> Service:
    """Starts `engine` and returns its service.  `options` are the engine's options, and `name` is the model's name.

    Raises `ValueError` if the model cannot be loaded."""
    await engine.start()
    model, is_dummy = str(options["model"]), options.get("dummy")
    texts: Texts = Numbers(engine.info.vocab_size) if is_dummy else await asyncio.to_thread(Tokenizer, path_of(model))
    return Service(engine, texts, name or Path(model).name, limits)


def hosts_of(host: str) -> list[str] | None:
    """Returns the host names that a request to a server at `host` may use.  None allows any name."""
    return [*LOOPBACK, "[::1]"] if host in LOOPBACK else None


def config_of(service: Service, host: str) -> uvicorn.Config:
    """Returns uvicorn's configuration for a server at `host`."""
    return uvicorn.Config(
        make_app(service, hosts_of(host)),
        http=partial(ClientConnection, receive_s=service.limits.receive_s),  # type: ignore[arg-type]  # it is only called
        log_level="warning",
        access_log=False,
        timeout_keep_alive=service.limits.keep_alive_s,
        timeout_graceful_shutdown=int(SHUTDOWN_WAIT_S) + 1,
        h11_max_incomplete_event_size=service.limits.max_head_bytes,
    )


async def serve(
    options: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    otlp_endpoint: str | None = None,
    drain_s: float = 30.0,
    pages: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Serves `LLM(**options)` as `name`, and web `pages` by path, until a signal.  `say` gets each line to print.

    Raises `ValueError` if the port is taken or no model can be loaded, and `EngineDied` if the engine ends early."""
    socket = bound(host, port)  # it listens when the model is loaded
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the soft limit is often 1,024: fewer connections than asked
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    stop_exporter: Callable[[], None] = lambda: None
    engine = Engine(options, threads)
    try:
        service = await service_of(engine, options, name, limits or Limits())
        service.pages |= pages or {}
        if otlp_endpoint:
            call_exporter, stop_exporter = exporter(otlp_endpoint, service.model)
            engine.ended.append(call_exporter)
        server = Server(config_of(service, host), service, drain_s, url_of(host, socket.getsockname()[1]), say)
        gc.freeze()  # else each collection while a body is parsed looks at all of torch: 0.5 s for 1 MiB of lists
        socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # its connections' end then stops no next server
        await server.serve([socket])
        if engine.died.is_set():
            raise EngineDied(engine.why)
    finally:
        socket.close()
        await engine.stop()
        stop_exporter()

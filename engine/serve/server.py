"""Starts the engine and the HTTP server, and ends them without losing an answer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOL_SOCKET
from socket import socket as Socket
from types import FrameType
from typing import Any

import uvicorn

from rooflab.engine.serve.api import Service, make_app
from rooflab.engine.serve.client import Call, Engine
from rooflab.engine.serve.limits import Limits
from rooflab.engine.serve.texts import texts_of
from rooflab.engine.serve.tracing import exporter

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAST_S = 4.0
"""How long a reader may take for what was written when the server ends."""
_POLL_S = 0.05


class Server(uvicorn.Server):
    """Uvicorn's server; on SIGTERM and SIGINT it refuses new requests and ends when all answers have.

    A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float):
        super().__init__(config)
        self._service = service
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn calls on a signal."""
        self.should_exit, self._service.draining = self._service.draining, True

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn asks ten times a second: whether to end."""
        service = self._service
        if service.engine.died.is_set():
            return True
        if service.draining and self._draining is None:
            self._draining = service.engine.keep(self._drain(), "drain")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[Socket] | None = None) -> None:
        """What uvicorn calls last: it waits for replies to end."""

        def hang_up() -> None:
            for connection in list(self.server_state.connections):
                connection.transport.abort()

        self._service.draining = True
        self._service.engine.cut()
        asyncio.get_running_loop().call_later(LAST_S, hang_up)
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self._service.engine.calls:
                    await asyncio.sleep(_POLL_S)
        self.should_exit = True


def bound(host: str, port: int) -> Socket:
    """A socket bound to that address: no other process can take it.  Raises `ValueError` if it is taken."""
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
    """Where a server at `host` and `port` answers."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def service_of(engine: Engine, options: Mapping[str, Any], name: str | None, limits: Limits) -> Service:
    """Starts `engine`, which is of `options`, and gives it its name and its tokenizer.

    Raises `ValueError` if the model cannot be loaded.
    """
    await engine.start()
    model = str(options["model"])
    texts = await asyncio.to_thread(texts_of, model, bool(options.get("dummy")), engine.info.vocab_size)
    return Service(engine, texts, name or Path(model).name, limits)


def hosts_of(host: str) -> list[str] | None:
    """The names by which a request may call a server that listens at `host`; None for any."""
    return [*LOOPBACK, "[::1]"] if host in LOOPBACK else None


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
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves `LLM(**options)` at `host` and `port` under `name` until a signal comes, and calls `ready` with the URL.

    Raises `ValueError` if the port is taken or the model cannot be loaded, and `EngineDied` if the engine ends before
    the server.
    """
    socket = bound(host, port)  # it listens when the model is loaded
    finish: Callable[[], None] = lambda: None
    engine = Engine(options, threads)
    try:
        service = await service_of(engine, options, name, limits or Limits())
        if otlp_endpoint:
            traced, finish = exporter(otlp_endpoint, service.model)
            engine.ended = _both(service.counters.ended, traced)
        app = make_app(service, hosts_of(host))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(LAST_S) + 1)
        url = url_of(host, socket.getsockname()[1])
        server = Server(config, service, drain_s)
        gc.freeze()  # else each collection while a body is parsed looks at all of torch: 0.5 s for 1 MiB of lists
        socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # its connections' end then stops no next server
        telling = engine.keep(_tell(server, url, ready), "tell")
        await server.serve([socket])
        telling.cancel()
        if engine.died.is_set():
            raise engine.death()
    finally:
        socket.close()
        await engine.stop()
        finish()


async def _tell(server: uvicorn.Server, url: str, ready: Callable[[str], None]) -> None:
    while not server.started:
        await asyncio.sleep(_POLL_S)
    ready(url)


def _both(*functions: Callable[[Call], None]) -> Callable[[Call], None]:
    def all_of_them(call: Call) -> None:
        for function in functions:
            function(call)

    return all_of_them

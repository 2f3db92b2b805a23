"""Sends requests, and stores the time and the bytes of each piece of an answer.  The bytes are parsed after the run.

One event loop in one thread does all work.  All times come from `perf_counter`.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from rooflab.bench.base.system_time import time
from rooflab.bench.load.http import Connection

clock = time.perf_counter
START_DELAY_S = 0.02
"""The seconds from the start of a run to the time from which its arrivals are counted."""
SPIN_WAIT_S = 1.5e-3
"""The loop's timers are exact to a millisecond, so in these last seconds of a wait the loop spins without sleeping."""
MAX_UNANSWERED = 20
"""The number of failed requests in a row that ends a closed loop; a dead server would fail thousands per second."""


@dataclass
class Shot:
    """Holds one shot: a request and its answer, as the client sent and received them."""

    index: int
    body: bytes
    prompt_tokens: int | None
    """The tokens of the prompt; None for a text, whose tokens the server counts."""
    output_tokens: int
    """The tokens that the request asks for."""
    scheduled_s: float = 0.0
    """The time when the request was due according to the arrivals alone."""
    sent_s: float | None = None
    end_s: float | None = None
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""
    """The reason why no whole answer came.  An error inside the answer is not given here."""


@dataclass
class Endpoint:
    """Holds the address of the server, the URL path for requests, and the open idle connections.

    Requests do not use a proxy, because a proxy would add time to each answer."""

    url: str
    path: str
    api_key: str | None = None
    timeout_s: float = 600.0
    idle: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname or address.query or "@" in address.netloc:
            raise ValueError(f"url: expected http://HOST:PORT, got {self.url!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout: expected seconds above 0, got {self.timeout_s}")
        self.host, self.ssl = address.hostname, address.scheme == "https" or None
        self.port = address.port or (443 if self.ssl else 80)
        self.base = address.path.rstrip("/").removesuffix("/v1")
        self.address = f"{address.scheme}://{address.netloc}{self.base}"
        self.key = f"Bearer {self.api_key}" if self.api_key else ""
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("api_key: expected printable characters of ASCII, got others")
        key_line = f"Authorization: {self.key}\r\n" if self.key else ""
        self.head = (
            f"POST {self.base}{self.path} HTTP/1.1\r\nHost: {address.netloc}\r\n{key_line}Accept: text/event-stream\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()

    async def send(self, shot: Shot) -> None:
        """Sends the request in `shot` and waits for the end of its answer.  Stores a failure in `shot.error`.

        Opens a connection if none is idle.  The time for this counts as latency, because a user would wait too."""
        shot.sent_s, connection = clock(), None
        try:
            async with asyncio.timeout(self.timeout_s):
                connection = await self._connection()
                request_bytes = self.head + b"%d\r\n\r\n" % len(shot.body) + shot.body
                shot.error = await connection.request(request_bytes, shot.pieces)
        except TimeoutError as error:
            # The system has another time limit for a connection; an error after it has a number.
            limit_text = "the system's limit" if error.errno else f"{self.timeout_s:g} s"
            shot.error = f"no {'end' if connection else 'connection'} after {limit_text}"
        except OSError as error:
            is_refused_error = isinstance(error, ConnectionRefusedError)
            shot.error = "connection refused" if is_refused_error else f"no connection: {error.strerror or error}"
        shot.end_s = clock()
        if connection is None:
            return
        shot.status, content_type = connection.framing.status, connection.framing.content_type
        if connection.open and not shot.error:
            self.idle.append(connection)
        else:
            connection.close()
        if not shot.error and shot.status == 200 and content_type != "text/event-stream":
            shot.error = f"expected an event stream, got {content_type or 'no content type'}"

    async def _connection(self) -> Connection:
        while self.idle:
            if (connection := self.idle.pop()).open:
                return connection
        event_loop = asyncio.get_running_loop()
        return (await event_loop.create_connection(Connection, self.host, self.port, ssl=self.ssl))[1]

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self.idle:
            connection.close()
        self.idle.clear()

    def get(self, path: str) -> tuple[int, Any, float]:
        """Sends a GET request.  Returns the HTTP status, the parsed JSON, and the time in the middle between sending
        and receiving.  The JSON is None if the answer is not JSON.

        Raises `ValueError` if no server answers."""
        start_s, is_https = clock(), self.ssl is not None
        connection = (HTTPSConnection if is_https else HTTPConnection)(self.host, self.port, timeout=10)
        try:
            connection.request("GET", self.base + path, headers={"Authorization": self.key} if self.key else {})
            response = connection.getresponse()
            status, response_bytes = response.status, response.read()
        except (OSError, HTTPException) as error:
            error_text = str(error) or type(error).__name__
            raise ValueError(f"url: expected a server at {self.address}, got {error_text}") from error
        finally:
            connection.close()
        mid_request_s = (start_s + clock()) / 2
        try:
            return status, json.loads(response_bytes), mid_request_s
        except ValueError:
            return status, None, mid_request_s


async def open_loop(target: Endpoint, shots: Sequence[Shot], offsets_s: Sequence[float]) -> float:
    """Sends each request at its scheduled time, even if earlier requests are slow or fail.  Returns the start time.

    `offsets_s` are the send times in seconds after the start."""
    begin_s, tasks = clock() + START_DELAY_S, []
    for shot, arrival_offset_s in zip(shots, offsets_s, strict=True):
        shot.scheduled_s = begin_s + arrival_offset_s
        await _until(shot.scheduled_s)
        tasks.append(asyncio.create_task(target.send(shot)))
    await asyncio.gather(*tasks)
    return begin_s


async def _until(due_s: float) -> None:
    if (remaining_s := due_s - clock()) > SPIN_WAIT_S:
        await asyncio.sleep(remaining_s - SPIN_WAIT_S)
    while clock() < due_s:
        await asyncio.sleep(0)


async def closed_loop(target: Endpoint, shots: Iterable[Shot], concurrency: int) -> tuple[float, list[Shot]]:
    """Keeps `concurrency` requests in flight.  Returns the loop's start time, and the requests that were sent.

    When a request ends, a new one is sent.  The loop ends early after 20 requests in a row without an answer."""
    begin_s, request_iter, sent_requests, silent = clock(), iter(shots), list[Shot](), 0

    async def user() -> None:
        nonlocal silent
        for shot in request_iter:
            if silent >= MAX_UNANSWERED:
                return
            shot.scheduled_s = clock()
            sent_requests.append(shot)
            await target.send(shot)
            silent = 0 if shot.status else silent + 1
            if silent == MAX_UNANSWERED:
                shot.error += f"; the {MAX_UNANSWERED}th in a row without an answer, so that the run ended"

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return begin_s, sent_requests


@contextmanager
def undisturbed() -> Iterator[None]:
    """Switches garbage collection off in a `with` block.  A collection would stop the client for milliseconds."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def body_of(fields: Mapping[str, Any]) -> bytes:
    """Returns the body of a request as JSON bytes without blanks."""
    return json.dumps(fields, separators=(",", ":")).encode()

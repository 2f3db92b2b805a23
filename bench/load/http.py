"""The least of HTTP/1.1 that a timed request needs: its bytes out, and the body of the answer with each piece's time.

aiohttp costs tens of microseconds a piece, and all streams of a batch get a token at once, so that the last of 64
would be read milliseconds late.  This takes the time first and does the rest after every ready socket has been read.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

clock = time.perf_counter
BLANK = b"\r\n\r\n"


class Framing:
    """Takes an answer's bytes in any pieces; gives the body's bytes, and says when the answer is whole."""

    def __init__(self) -> None:
        self.status, self.whole, self.keep, self.content_type = 0, False, True, ""
        self._rest, self._left, self._head, self._chunked = b"", 0, True, False
        self._endless = False

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data` and what waited for it.  Raises `ValueError` on what is not HTTP/1.1."""
        data = self._rest + data
        self._rest = b""
        if self._head:
            head, blank, data = data.partition(BLANK)
            if not blank:
                self._rest = head
                return b""
            self._read_head(head)
        if self._chunked:
            return self._dechunk(data)
        if not self._endless:
            self._left -= len(data)
            self.whole = self._left <= 0
        return data

    def ended(self) -> bool:
        """Called where the server closes the connection: whether the answer is whole."""
        return self.whole or (self._endless and not self._head)

    def _read_head(self, head: bytes) -> None:
        first, *rows = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ValueError(f"answer: expected HTTP/1.1, got {first[:40]!r}")
        fields = {name.strip().lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        self._head, self.status = False, int(status[:3])
        self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        self._left = 0 if self._chunked else int(fields.get("content-length", -1))
        self._endless = not self._chunked and self._left < 0
        self.content_type = fields.get("content-type", "").partition(";")[0]
        self.keep = fields.get("connection", "").lower() != "close" and version == "HTTP/1.1" and not self._endless

    def _dechunk(self, data: bytes) -> bytes:
        """`_left` is the rest of the chunk under way with the line end behind it."""
        body = b""
        at = 0
        while at < len(data):
            if not self._left:
                line = data.find(b"\r\n", at)
                if line < 0:
                    break
                size = int(data[at:line].partition(b";")[0], 16)
                if not size:  # behind the last chunk perhaps fields, and an empty line
                    if (end := data.find(BLANK, line)) >= 0:
                        self.whole, at = True, end + len(BLANK)
                    break
                self._left, at = size + 2, line + 2
            part = data[at : at + self._left]
            at += len(part)
            cut = max(0, len(part) - max(0, 2 - (self._left - len(part))))
            body += part[:cut]
            self._left -= len(part)
        self._rest = data[at:]
        return body


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[float, bytes]] = []
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def request(self, data: bytes, pieces: list[tuple[float, bytes]]) -> asyncio.Future[str]:
        """Sends `data`, and fills `pieces` with the body; the future is why it did not end well, or empty."""
        self.framing, self._pieces = Framing(), pieces
        self._done: asyncio.Future[str] = self._loop.create_future()
        self._transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        """Takes the time; what the bytes mean waits until the other ready sockets have been read."""
        self._pending.append((clock(), data))
        if len(self._pending) == 1:
            self._loop.call_soon(self._progress)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the request under way."""
        self.open = False
        self._progress()
        self._end("" if self.framing.ended() else "connection dropped")

    def close(self) -> None:
        """Ends the connection at once."""
        self.open = False
        self._transport.abort()

    def _progress(self) -> None:
        for time_s, data in self._pending:
            try:
                if body := self.framing.feed(data):
                    self._pieces.append((time_s, body))
            except ValueError as error:
                self._end(str(error))
                self.close()
        self._pending.clear()
        if self.framing.whole:
            self.open = self.open and self.framing.keep
            self._end("")

    def _end(self, why: str) -> None:
        if not self._done.done():
            self._done.set_result(why)

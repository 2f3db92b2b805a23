"""Implements a small part of HTTP/1.1: sends a request, and takes the arrival time of each piece of the answer.

All streams of a batch get a token at the same time.  aiohttp needs tens of microseconds to read a piece.  With 64
streams, the last stream would be read some milliseconds too late.  This code reads all ready sockets before it parses.
"""

from __future__ import annotations

import asyncio
import re
from typing import cast

from rooflab.bench.base.system_time import time

clock = time.perf_counter
HEADERS_END = b"\r\n\r\n"
DROPPED_ERROR = "connection dropped"
MAX_HEAD_BYTES = 1 << 16
"""The most bytes of an answer's head, and of a chunk's size line: a longer text would be joined again at each piece."""


class Framing:
    """Parses an HTTP answer that arrives in pieces.  Extracts the body, and detects the end of the answer."""

    def __init__(self) -> None:
        self.status, self.whole, self.keep, self.content_type = 0, False, True, ""
        self._rest, self._left, self._head, self._chunked = b"", 0, True, False
        self._endless = False

    def feed(self, data: bytes) -> bytes:
        """Parses `data` and earlier unparsed bytes into body bytes.  Raises `ValueError` if the answer is not HTTP/1.1.

        Bytes after the answer's end may belong to another answer.  After such bytes, the connection is not reused."""
        if self.whole:
            self.keep = False
            return b""
        data = self._rest + data
        self._rest = b""
        while self._head:  # a head with status 1xx, such as 103, comes before the answer's head
            header_bytes, header_separator, data = data.partition(HEADERS_END)
            if len(header_bytes) > MAX_HEAD_BYTES:
                raise ValueError(f"answer: expected a head of at most {MAX_HEAD_BYTES} bytes, got more")
            if not header_separator:
                self._rest = header_bytes
                return b""
            self._read_head(header_bytes)
        if self._chunked:
            return self._dechunk(data)
        if not self._endless:
            data, extra_bytes = data[: self._left], data[self._left :]
            self._left -= len(data)
            self.whole, self.keep = self._left == 0, self.keep and not extra_bytes
        return data

    def ended(self) -> bool:
        """Returns whether the answer is complete if the connection closes.  An answer without a length ends there."""
        return self.whole or (self._endless and not self._head)

    def _read_head(self, head: bytes) -> None:
        status_line, *rows = head.decode("latin-1").split("\r\n")
        protocol, _, status_text = status_line.partition(" ")
        if not protocol.startswith("HTTP/1.") or not status_text[:3].isdecimal():
            raise ValueError(f"answer: expected HTTP/1.1, got {status_line[:40]!r}")
        if 100 <= (status_code := int(status_text[:3])) < 200:
            return
        headers = {name.strip().lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        self._head, self.status = False, status_code
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        content_length = "0" if self._chunked or status_code in (204, 304) else headers.get("content-length")
        self._endless = content_length is None
        self._left = 0 if content_length is None else _number("a content length", content_length, 10)
        self.content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        self.keep = headers.get("connection", "").lower() != "close" and protocol == "HTTP/1.1" and not self._endless

    def _dechunk(self, data: bytes) -> bytes:
        """Decodes a chunked HTTP body and returns the content in `data`. Keeps incomplete chunks for the next call."""
        body = b""
        offset = 0
        while offset < len(data):
            if not self._left:
                line_end = data.find(b"\r\n", offset)
                if line_end < 0 and len(data) - offset <= MAX_HEAD_BYTES:
                    break
                size = _number("a chunk's size", data[offset:line_end].decode("latin-1").partition(";")[0].strip(), 16)
                if not size:  # after the last chunk there may be fields, then an empty line
                    if (trailer_end := data.find(HEADERS_END, line_end)) >= 0:
                        self.whole, offset = True, trailer_end + len(HEADERS_END)
                        self.keep = self.keep and offset == len(data)
                    break
                self._left, offset = size + 2, line_end + 2
            chunk = data[offset : offset + self._left]
            offset += len(chunk)
            stop = max(0, len(chunk) - max(0, 2 - (self._left - len(chunk))))
            if chunk[stop:].strip(b"\r\n"):
                raise ValueError(f"answer: expected a line end behind a chunk, got {chunk[stop:].decode('latin-1')!r}")
            body += chunk[:stop]
            self._left -= len(chunk)
        self._rest = data[offset:]
        return body


def _number(what: str, text: str, base: int) -> int:
    """Converts digits to a number. Raises `ValueError` for signs, blanks and underscores, which `int` accepts."""
    if not re.fullmatch("[0-9]{1,15}" if base == 10 else "[0-9a-fA-F]{1,15}", text):
        raise ValueError(f"answer: expected {what}, got {text[:40]!r}")
    return int(text, base)


class Connection(asyncio.Protocol):
    """Represents a connection to the server.  A connection carries one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[float, bytes]] = []
        self._pieces: list[tuple[float, bytes]] = []
        self._done: asyncio.Future[str] = self._loop.create_future()
        self.framing, self.open = Framing(), True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores `transport`, which later sends the bytes of requests."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def request(self, data: bytes, pieces: list[tuple[float, bytes]]) -> asyncio.Future[str]:
        """Sends `data` and appends the answer's body to `pieces`.  The future returns an error text, "" on success."""
        self.framing, self._pieces, self._done = Framing(), pieces, self._loop.create_future()
        if self.open:
            self._transport.write(data)
        else:  # the server closed the connection as soon as it was open
            self._end(DROPPED_ERROR)
        return self._done

    def data_received(self, data: bytes) -> None:
        """Stores `data` and its arrival time.  The bytes are parsed after all other ready sockets were read."""
        self._pending.append((clock(), data))
        if len(self._pending) == 1:
            self._loop.call_soon(self._progress)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the current request, because the connection was closed."""
        self.open = False
        self._progress()
        self._end("" if self.framing.ended() else DROPPED_ERROR)

    def close(self) -> None:
        """Closes the connection immediately."""
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
                break
        self._pending.clear()
        if self.framing.whole:
            self.open = self.open and self.framing.keep
            self._end("")

    def _end(self, why: str) -> None:
        if not self._done.done():
            self._done.set_result(why)

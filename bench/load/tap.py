"""A wire tap: records another client's requests to a server and the times of answers, as a trace for `rooflab xray`.

    python -m rooflab.bench.load.tap --to http://127.0.0.1:8000 --port 8001 --out trace.ndjson

So another tool's report can be compared with its own definitions on the same answers, without the noise of the machine.
Times are taken here, between the two processes: after the client sent and before it reads.  If a client leaves, the tap
notes this, and so does the server.  SIGINT or SIGTERM ends the tap and writes the trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rooflab.bench.load.answers import read_answer
from rooflab.bench.load.client import Shot, clock
from rooflab.bench.load.http import BLANK, Framing
from rooflab.bench.load.trace import Trace, phased

READ = 1 << 16


@dataclass
class Tap:
    """Forwards HTTP/1.1 to `host` and `port`, and keeps each streamed answer."""

    host: str
    port: int
    shots: list[Shot] = field(default_factory=list)

    async def connection(self, client_in: StreamReader, client_out: StreamWriter) -> None:
        """Carries one connection of a client, request by request, until either end closes it."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            server_in, server_out = await asyncio.open_connection(self.host, self.port)
            while not client_out.is_closing():
                head = await client_in.readuntil(BLANK)
                body = await client_in.readexactly(_length(head))
                shot = Shot(len(self.shots), body, None, 0)
                shot.scheduled_s = shot.free_s = shot.sent_s = clock()
                server_out.write(head + body)
                if b'"stream"' in body and json.loads(body).get("stream"):
                    self.shots.append(shot)
                shot.error = "no end when the tap ended"
                shot.error = await _answer(server_in, client_out, shot)
                if shot.error:
                    break
            server_out.close()
        client_out.close()

    def trace(self, skip: int) -> Trace:
        """The trace of all kept answers; the first `skip` are the warm-up.  Raises `ValueError` without others."""
        if len(self.shots) <= skip:
            raise ValueError(f"tap: expected more than {skip} streamed requests, got {len(self.shots)}")
        begin, last = self.shots[skip].scheduled_s, self.shots[-1].scheduled_s
        requests = phased([read_answer(shot) for shot in self.shots], begin, last)
        return Trace(begin, 0.0, last, requests, {"data": "another client"})


def _length(head: bytes) -> int:
    """The number of bytes of a request's body."""
    for row in head.lower().split(b"\r\n"):
        if row.startswith(b"content-length:"):
            return int(row.partition(b":")[2])
    return 0


async def _answer(server: StreamReader, client: StreamWriter, shot: Shot) -> str:
    """Forwards one answer into `shot`; returns the reason if it did not end well, else an empty text."""
    framing = Framing()
    while not framing.whole:
        data, now = await server.read(READ), clock()
        if not data:
            return "" if framing.ended() else "connection dropped"
        if client.is_closing():
            return "the client left"
        client.write(data)
        if piece := framing.feed(data):
            shot.pieces.append((now, piece))
        shot.status, shot.end_s = framing.status, now
    return ""


async def tap(url: str, port: int, out: Path, skip: int) -> None:
    """Taps the server at `url` on `port` until a signal comes, and saves the trace to `out`."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"to: expected http://HOST:PORT, got {url!r}")
    own, ended = Tap(parts.hostname, parts.port or 80), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = await asyncio.start_server(own.connection, "127.0.0.1", port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]} taps {url}", flush=True)
    await ended.wait()
    server.close()
    own.trace(skip).save(out)


def main() -> None:
    """Runs the tap with the options of the command line."""
    parser = argparse.ArgumentParser(description="Traces what another client does with a server.")
    parser.add_argument("--to", required=True, help="the server, http://HOST:PORT")
    parser.add_argument("--port", type=int, default=0, help="where the client asks; 0: any that is free")
    parser.add_argument("--out", type=Path, default=Path("trace.ndjson"))
    parser.add_argument("--skip", type=int, default=0, help="first requests that do not count")
    given = parser.parse_args()
    try:
        asyncio.run(tap(given.to, given.port, given.out, given.skip))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

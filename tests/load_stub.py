"""A server that only streams: each chunk holds the time at which it was written, so that a client's error is known.

`python tests/load_stub.py` prints its port.  A request's field `stub` changes how it is answered (`Manner`).
The times are of `perf_counter`, which all processes of one Linux host share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

clock = time.perf_counter


@dataclass(frozen=True)
class Manner:
    """How requests are answered."""

    ttft_ms: float = 5.0
    interval_ms: float = 5.0
    """Between two chunks."""
    bundle: int = 1
    """Tokens of a chunk."""
    counted: str = ""
    """Where a chunk says how many tokens it has: `usage`, `logprobs`, or nowhere."""
    stall_at: int = -1
    """The chunk before which the server works on a prompt of 512 tokens for `stall_ms`; `GET /steps` tells of it."""
    stall_ms: float = 50.0


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self, manner: Manner, steps: list[dict[str, Any]] | None) -> None:
        self.manner, self.steps, self.buffer = manner, steps, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        """Answers when a request is whole; a client sends the next one only after the answer."""
        received = clock()
        self.buffer += data
        head, blank, rest = self.buffer.partition(b"\r\n\r\n")
        length = next((int(row[15:]) for row in head.split(b"\r\n") if row.lower().startswith(b"content-length:")), 0)
        if not blank or len(rest) < length:
            return
        self.buffer = rest[length:]
        path = head.split(b" ", 2)[1].decode()
        if path == "/v1/models":
            self._whole(200, {"object": "list", "data": [{"id": "stub"}]})
        elif path == "/steps" and self.steps is not None:
            self._whole(200, {"now_s": clock(), "steps": self.steps})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self._answer(json.loads(rest[:length]), path.startswith("/v1/chat"), received)
        else:
            self._whole(404, {"error": {"message": f"no {path} here"}})

    def _whole(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def _answer(self, body: Mapping[str, Any], chat: bool, received: float) -> None:
        manner = replace(self.manner, **body.get("stub", {}))
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        tokens = int(body.get("max_completion_tokens") or body["max_tokens"])
        prompt = body.get("prompt") or str(body["messages"][-1]["content"]).split()
        _Stream(self, manner, chat, tokens, len(prompt), received).start()


class _Stream:
    """The chunks of one answer, each at its time."""

    def __init__(self, stub: Stub, manner: Manner, chat: bool, tokens: int, prompt: int, received: float) -> None:
        self.stub, self.manner, self.chat = stub, manner, chat
        self.tokens, self.prompt, self.received, self.sent, self.number = tokens, prompt, received, 0, 0
        self.loop = asyncio.get_running_loop()
        choice = {"index": 0, "finish_reason": None} | ({"delta": {"content": "a"}} if chat else {"text": "a"})
        self.usual = (
            b'data: %b, "written_s": ' % json.dumps({"choices": [choice], "received_s": received})[:-1].encode()
        )

    def start(self) -> None:
        """The role, which a chat server sends at once, and the first chunk at its time."""
        if self.chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        self.due = self.received + 1e-3 * self.manner.ttft_ms
        self._later(self._chunk)

    def _later(self, call: Callable[[], None]) -> None:
        self.loop.call_later(max(0.0, self.due - clock()), call)

    def _chunk(self) -> None:
        manner, transport = self.manner, self.stub.transport
        if transport.is_closing():
            return
        count = min(manner.bundle, self.tokens - self.sent)
        self.sent += count
        self.number += 1
        reason = "length" if self.sent >= self.tokens else None
        self._write(self._stamped(count, reason))
        if reason:
            return self._finish()
        self.due += 1e-3 * manner.interval_ms
        if self.number == manner.stall_at:
            begin, self.due = self.due, self.due + 1e-3 * manner.stall_ms
            step: dict[str, Any] = {"number": 0, "begin_s": begin, "end_s": self.due, "num_decodes": 1}
            step |= {"prompt_tokens": 512, "preempted": 0, "evicted": 0, "waited": None, "running": 2, "waiting": 0}
            (self.stub.steps if self.stub.steps is not None else []).append(step)
        self._later(self._chunk)
        return None

    def _stamped(self, count: int, reason: str | None) -> bytes:
        """An event with tokens, and the time as the last thing before it is written."""
        if (count, reason) == (1, None) and not self.manner.counted:  # the usual one, made before
            return b"%b%.9f}\n\n" % (self.usual, clock())
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"delta": {"content": "a" * count}} if self.chat else {"text": "a" * count}
        if self.manner.counted == "logprobs":
            choice["logprobs"] = {"content": [{"token": "a"}] * count} if self.chat else {"tokens": ["a"] * count}
        event: dict[str, Any] = {"choices": [choice]}
        if self.manner.counted == "usage":
            event["usage"] = {"completion_tokens": self.sent, "prompt_tokens": self.prompt}
        text = json.dumps({**event, "received_s": self.received})[:-1].encode()
        return b'data: %b, "written_s": %.9f}\n\n' % (text, clock())

    def _finish(self) -> None:
        self._event({"choices": [], "usage": {"completion_tokens": self.sent, "prompt_tokens": self.prompt}})
        self._write(b"data: [DONE]\n\n")
        self.stub.transport.write(b"0\r\n\r\n")

    def _event(self, value: Mapping[str, Any]) -> None:
        self._write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.stub.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(manner: Manner, steps: bool) -> None:
    """Serves on a free port of 127.0.0.1, which it prints, until it is ended."""
    known: list[dict[str, Any]] | None = [] if steps else None
    server = await asyncio.get_running_loop().create_server(lambda: Stub(manner, known), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """The command line: `--ttft-ms`, `--interval-ms`, `--steps`."""
    import uvloop

    parser = argparse.ArgumentParser()
    parser.add_argument("--ttft-ms", type=float, default=5.0)
    parser.add_argument("--interval-ms", type=float, default=5.0)
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    uvloop.run(serve(Manner(given.ttft_ms, given.interval_ms), given.steps))


if __name__ == "__main__":
    main()

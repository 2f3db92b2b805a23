"""The connections of clients and proxies to the server, and the server's answers on them."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from needs import skip_without
from served import WAIT_S

from rooflab.engine.load.tokenizer import Numbers
from rooflab.engine.serve.api import Service
from rooflab.engine.serve.client import Engine
from rooflab.engine.serve.limits import Limits
from rooflab.engine.serve.server import Server, bound, config_of
from rooflab.engine.serve.wire import Ready, StepLine

PAIR = b'{"prompt": "Hi"}'
JSON = b"content-type: application/json\r\n"


@asynccontextmanager
async def serving(texts: Numbers, steps: int = 0, learn: str = "", **limits) -> AsyncIterator[Server]:
    """A server whose engine has made `steps` steps, takes requests and never answers."""
    skip_without("loopback")
    engine, listening = Engine({}), bound("127.0.0.1", 0)
    engine.info = Ready("tiny", "cpu", "float32", 1024, 256, 4, 100, 16, [])
    engine.steps.extend([StepLine(1, 0.1, 0.2, 1, 9, 0, 0, 1, 0, 0, 1, 0, 0.0)] * steps)
    service = Service(engine, texts, "tiny", Limits(**limits))
    service.pages |= {"/learn": learn} if learn else {}
    server = Server(config_of(service, "127.0.0.1"), service, 0.0, "", lambda text: None)
    task = asyncio.create_task(server.serve([listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    assert server.config.timeout_keep_alive == service.limits.keep_alive_s
    yield server
    server.should_exit = True
    await task
    await engine.stop()


async def talk(server: Server, line: str, *parts: bytes, wait_s: float = 0.0) -> bytes:
    """What comes until the server closes, if `parts` are sent behind a line and two headers.

    A socket, not a stream: if a server closes before it has read all, a stream may lose what came before the reset.
    """
    loop, found = asyncio.get_running_loop(), b""
    head = f"{line}\r\nhost: localhost\r\nconnection: close\r\n".encode() if line else b""
    with socket.create_connection(server.servers[0].sockets[0].getsockname()) as connection:
        connection.setblocking(False)
        async with asyncio.timeout(WAIT_S):
            with suppress(ConnectionError):
                for part in (head, *parts) if head else parts:
                    await loop.sock_sendall(connection, part)
                    await asyncio.sleep(wait_s)
            with suppress(ConnectionError):
                while received := await loop.sock_recv(connection, 2**16):
                    found += received
    return found


def of_length(body: bytes) -> bytes:
    return b"content-length: %d\r\n\r\n" % len(body) + body


GETS = ("/health", "/v1/models", "/v1/models/tiny", "/metrics", "/steps", "/live", "/", "/openapi.json")
WANTED = {
    **dict.fromkeys(GETS, (b"200", b"", b"")),  # their heads, which an endless stream has too
    "no type": (b"415", b"", b"content-type: expected 'application/json', got None"),
    "another host": (b"400", b"", b"host: expected 127.0.0.1 (or another --host), got 'elsewhere'"),
    "a long head": (b"431", b"", b"head: expected at most 65536 bytes"),
    "half a head": (b"408", b"close", b"the request did not arrive in 3 s"),
    "half a body": (b"408", b"close", b"the request did not arrive in 3 s"),
    "two lengths": (b"400", b"close", b"http: expected Content-Length or Transfer-Encoding, got both"),
    "nonsense": (b"400", b"close", b'"message":"http: illegal request line'),
    "HTTP/2 offered": (b"200", b"", b'"count":2'),
    "HTTP/1.0": (b"200", b"", b'"steps": []}'),
    "a body of 8 MiB": (b"413", b"", b"body: expected at most 1000 bytes"),
    "twice": (b"200", b"HTTP/1.1 200 OK", b'{"status":"ok"}'),  # and is closed only then
}


async def every_manner() -> dict[str, bytes]:
    post, offer = "POST /tokenize HTTP/1.1", b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    chunks = b"transfer-encoding: chunked\r\n\r\n10\r\n%b\r\n" % PAIR
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with serving(Numbers(1024), receive_s=3.0, keep_alive_s=2, max_body_bytes=1000) as server:
        asked = {path: talk(server, f"HEAD {path} HTTP/1.1", b"\r\n") for path in GETS} | {
            "no type": talk(server, post, of_length(PAIR)),
            "another host": talk(server, "", b"GET /health HTTP/1.1\r\nhost: elsewhere:1\r\nconnection: close\r\n\r\n"),
            "a long head": talk(server, post, b"a: %b\r\n\r\n" % (b"x" * 66_000)),
            "half a head": talk(server, post, *[b"a: b\r\n"] * 4, wait_s=0.2),
            "half a body": talk(server, post, JSON + b"content-length: 100\r\n\r\n{"),
            "two lengths": talk(server, "", health[:-2], b"content-length: 3\r\n", chunks, b"0\r\n\r\n"),
            "nonsense": talk(server, "", b"nonsense\r\n\r\n"),
            "HTTP/2 offered": talk(server, post, offer + JSON + chunks, b"0\r\n\r\n", wait_s=0.05),
            "HTTP/1.0": talk(server, "GET /steps HTTP/1.0", b"\r\n"),
            "a body of 8 MiB": talk(server, post, JSON + of_length(b"x" * (1 << 23))),
            "twice": talk(server, "", health, health, wait_s=1.4),
            "nothing": talk(server, ""),
        }
        return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))


def test_a_connection_gets_an_answer_or_an_end_whatever_comes():
    found = asyncio.run(every_manner())
    assert found.pop("nothing") == b"" and found.keys() == WANTED.keys()
    for name, (status, in_head, in_body) in WANTED.items():
        head, _, body = found[name].partition(b"\r\n\r\n")
        assert head[9:12] == status and in_head in found[name] and in_body in body, (name, head, body)
        assert bool(body) == bool(in_body) and (name != "HTTP/1.0" or b"chunked" not in head), (name, head, body)


def test_a_burst_is_counted_before_its_prompts_are_encoded():
    class Slow(Numbers):
        def encode(self, prompt):
            time.sleep(0.05)
            return super().encode(prompt)

    async def burst() -> list[bytes]:
        ask = JSON + of_length(b'{"model": "tiny", "prompt": ["x", "y"]}')
        async with serving(Slow(1024), max_queue=4, timeout_s=2.0) as server:  # for 8 answers
            return await asyncio.gather(*(talk(server, "POST /v1/completions HTTP/1.1", ask) for _ in range(9)))

    statuses = sorted(reply[9:12] for reply in asyncio.run(burst()))
    assert statuses == [b"408"] * 4 + [b"429"] * 5


def test_a_reader_that_does_not_read_is_left(monkeypatch):
    monkeypatch.setattr("rooflab.engine.serve.server.SLOW_READER_S", 0.5)

    async def ask() -> None:
        async with serving(Numbers(9), steps=20_000) as server:
            _, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
            writer.write(b"GET /steps HTTP/1.1\r\nhost: localhost\r\n\r\n")
            async with asyncio.timeout(WAIT_S):
                for there in (True, False):
                    while bool(server.server_state.connections) != there:
                        await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(ask())


def test_keys_and_pages_of_other_sites():
    async def ask() -> list[int]:
        given = ["Bearer secret", "bearer secret", "BEARER  secret ", "Basic secret", "secret", "Bearer Secret"]
        browser = "origin: https://chat.example\r\naccess-control-request-method: POST\r\n\r\n"
        async with serving(Numbers(9), api_key="secret", origins=("https://chat.example",)) as server:
            asked = [("GET", f"authorization: {one}\r\n\r\n") for one in given]
            asked += [("OPTIONS", how) for how in (browser, browser.replace("chat", "elsewhere"), "\r\n")]
            return [int((await talk(server, f"{how} /steps HTTP/1.1", ask.encode()))[9:12]) for how, ask in asked]

    assert asyncio.run(ask()) == [200] * 3 + [401] * 3 + [200, 400, 405]
    with pytest.raises(ValueError, match="api_key: expected a text without white space"):
        Limits(api_key="secret\n")


def test_a_page_that_the_server_is_given_needs_no_key():
    async def ask(learn: str) -> bytes:
        async with serving(Numbers(9), learn=learn, api_key="secret") as server:
            return await talk(server, "GET /learn HTTP/1.1", b"\r\n")

    page = asyncio.run(ask("<p>Learn</p>"))
    assert page[9:12] == b"200" and b"text/html" in page and page.endswith(b"<p>Learn</p>")
    assert asyncio.run(ask(""))[9:12] == b"404"

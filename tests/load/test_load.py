"""The load generator's client: bytes in any pieces, the time of each piece, and failures with their reasons."""

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import stub_server

from rooflab.bench.load.answers import events
from rooflab.bench.load.client import Endpoint, Shot, body_of, open_loop
from rooflab.bench.load.http import Framing

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;x=y\r\n \r\n10\r\nworld\r\n\r\n1234567\r\n0\r\nTrailer: a\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nConnection: close\r\n\r\nabcde"


@pytest.mark.parametrize(
    "text, wanted",
    [(CHUNKED, (200, "text/event-stream", True, b"hello world\r\n\r\n1234567")), (SIZED, (404, "", False, b"abcde"))],
)
@given(cuts=st.sets(st.integers(1, 200)))
def test_an_answer_may_come_in_any_pieces(text, wanted, cuts):
    framing, body = Framing(), b""
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for begin, end in pairwise(bounds):
        assert not framing.whole
        body += framing.feed(text[begin:end])
    assert framing.whole and (framing.status, framing.content_type, framing.keep, body) == wanted


def test_each_token_is_read_after_the_server_wrote_it():
    """The stub puts the time of writing into each event; both processes have the same clock."""
    body = body_of({"model": "stub", "prompt": [1], "max_tokens": 5, "stream": True})
    shots = [Shot(index, body, 1, 5) for index in range(4)]
    with stub_server() as url:
        asyncio.run(open_loop(Endpoint(url, "/v1/completions", timeout_s=20), shots, [0.0, 0.05, 0.06, 0.06]))
    for shot in shots:
        times = [
            (json.loads(text)["written_s"], read_s) for read_s, text, _ in events(shot.pieces) if "written_s" in text
        ]
        assert shot.error == "" and len(times) >= 5
        assert all(shot.sent_s <= written_s <= read_s <= shot.end_s for written_s, read_s in times)


def test_a_connection_that_is_never_there_costs_its_request(monkeypatch):
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", lambda *of, **more: asyncio.sleep(9))
    late = Shot(0, body_of({"model": "stub", "prompt": [1], "stream": True}), 1, 5)
    asyncio.run(open_loop(Endpoint("http://127.0.0.1:9", "/v1/completions", timeout_s=0.1), [late], [0.0]))
    assert late.error == "no connection after 0.1 s"

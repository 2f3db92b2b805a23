"""The load generator's client: bytes in any pieces, the time of each piece, and failures with their reasons."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import stub_server

from rooflab.bench.load.client import Endpoint, Shot, body_of, open_loop
from rooflab.bench.load.http import Framing
from rooflab.bench.load.trace import load_trace

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;x=y\r\n \r\n10\r\nworld\r\n\r\n1234567\r\n0\r\nTrailer: a\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nConnection: close\r\n\r\nabcde"


def written_and_read(shot: Shot) -> Iterator[tuple[float, float]]:
    """For each token of an answer, when the server wrote it and when its last byte was read here."""
    ends = list(accumulate(len(data) for _, data in shot.pieces))
    at, read = 0, 0
    for event in b"".join(data for _, data in shot.pieces).split(b"\n\n")[:-1]:
        read += len(event) + 2
        while ends[at] < read:
            at += 1
        if b'"written_s"' in event:
            yield json.loads(event[6:])["written_s"], shot.pieces[at][0]


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


@pytest.fixture(scope="module")
def stub():
    with stub_server() as url:
        yield url


def shots(count):
    body = body_of({"model": "stub", "prompt": [1], "max_tokens": 5, "stream": True})
    return [Shot(index, body, 1, 5) for index in range(count)]


def sent(url, own, offsets=None, timeout_s=20.0):
    async def run():
        target = Endpoint(url, "/v1/completions", timeout_s=timeout_s)
        await open_loop(target, own, offsets or [0.0] * len(own), None)
        target.close()

    asyncio.run(run())
    return own


def test_a_tap_sees_what_another_client_sees(stub, tmp_path):
    """Each token passes the tap after the server wrote it and before the client reads it; the first request is left
    out, and so is what asks for no stream."""
    out = tmp_path / "trace.ndjson"
    command = [sys.executable, "-m", "rooflab.bench.load.tap", "--to", stub, "--out", str(out), "--skip", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[0]
        own = sent(url, shots(4), [0.0, 0.05, 0.06, 0.06])
        assert Endpoint(url, "").get("/health")[0] in (200, 404)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    trace = load_trace(out)
    assert len(trace.requests) == 4 and len(trace.counted) == 3
    for request, shot in zip(trace.requests, sorted(own, key=lambda shot: shot.sent_s), strict=True):
        assert shot.sent_s <= request.sent_s and request.error == "" and request.output_tokens in (5, None)
        passed = [chunk.time_s for chunk in request.chunks if chunk.kind == "text"]
        for (written, read), at in zip(written_and_read(shot), passed, strict=True):
            assert written <= at <= read


def test_a_connection_that_is_never_there_costs_its_request(monkeypatch):
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", lambda *of, **more: asyncio.sleep(9))
    (late,) = sent("http://127.0.0.1:9", shots(1), timeout_s=0.1)
    assert late.error == "no connection after 0.1 s"

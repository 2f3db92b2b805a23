"""The load client against servers that misbehave, played byte by byte by a socket that shares no code with it.

A play is the bytes of an answer and the events between them: seconds of silence, FIN, RST.  The warm-up and the
requests around a play get a right answer of four tokens, so that the effect of one play can be seen.
"""

import json
import re
import socket
import struct
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace

import pytest
from needs import skip_without
from typer import Exit

from rooflab.bench.cli.app import exit_for
from rooflab.bench.load import load_record, load_run
from rooflab.bench.load.client import Endpoint
from rooflab.bench.load.data import Data
from rooflab.bench.load.metrics import failures, remarks

FIN, RST = object(), object()
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
HEAD = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
END, DONE, ROLE = b"0\r\n\r\n", b"data: [DONE]\n\n", {"delta": {"role": "assistant", "content": ""}}


def say(*choices, usage=None, end=b"\n\n"):
    """An event of a stream; a text is a choice's, a number the tokens so far."""
    own = [{"text": one} if isinstance(one, str) else one for one in choices]
    return b"data: " + json.dumps({"choices": own} | ({"usage": usage} if usage else {})).encode() + end


def total(tokens, prompt=3):
    return {"completion_tokens": tokens, "prompt_tokens": prompt}


def framed(*parts):
    """Parts as chunks of HTTP; what is not bytes stays."""
    return [b"%x\r\n%b\r\n" % (len(part), part) if isinstance(part, bytes) else part for part in parts]


TOKENS = [say("a"), 0.002, say("b"), 0.002, say("c"), 0.002, say({"text": "d", "finish_reason": "length"})]
USAGE = say(usage=total(4))
BODY = b"".join(part for part in TOKENS if isinstance(part, bytes)) + USAGE + DONE


def stream(*parts):
    return [HEAD, *framed(*parts), END]


def plain(body=BODY, head=STREAM, end=()):
    """An answer with its length, or without one up to the connection's end."""
    return [head + (b"" if end else b"Content-Length: %d\r\n" % len(body)) + b"\r\n" + body, *end]


def status(line, body=b'{"error": {"message": "busy"}}', fields=b"Retry-After: 1\r\n"):
    return [b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (line, fields, len(body), body)]


GOOD = stream(*TOKENS, USAGE, DONE)


@contextmanager
def player(play, plays, seen=None):
    """The address of a server that answers its n-th request with `play` where `plays(n)`, and notes all in `seen`."""
    skip_without("loopback")
    count, lock = -1, threading.Lock()

    def answer(link):
        nonlocal count
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError), link, link.makefile("rb") as asked:
            while first := asked.readline():
                fields = b"".join(iter(lambda: asked.readline() or b"\r\n", b"\r\n"))
                body = asked.read(int((re.findall(rb"(?i)content-length: *(\d+)", fields) or [0])[0]))
                if seen is not None:
                    seen.append((fields.decode().lower(), body))
                if first.startswith(b"GET"):
                    models = b'{"data": [{"id": "m"}]}' if b"/models" in first else b"[]"
                    return link.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + models)
                with lock:
                    count += 1
                    number = count
                for part in play if plays(number) else GOOD:
                    if part is RST:
                        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    if part is RST or part is FIN:
                        return None
                    link.sendall(part) if isinstance(part, bytes) else time.sleep(part)
        return None

    def accept():
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


RIGHT = {
    "as asked": GOOD,
    "HTTP/1.0": plain(head=STREAM.replace(b"1.1", b"1.0"), end=[FIN]),
    "a content type in other case": [HEAD.replace(b"text/event-stream", b"Text/Event-Stream ; Charset=X"), *GOOD[1:]],
    "103 before": [b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n", 2e-3, *GOOD],
    "no empty line at the end": stream(*TOKENS, USAGE, DONE.strip()),
    "no finish reason": stream(*TOKENS[:-1], say("d"), USAGE, DONE),
    "RST behind [DONE]": [*stream(*TOKENS, USAGE, DONE)[:-1], 0.01, RST],
    "tokens behind [DONE]": stream(*TOKENS, USAGE, DONE, *TOKENS),
    "nulls": stream(*(part.replace(b"}]}", b'}], "usage": null}') if part != 2e-3 else part for part in TOKENS), DONE),
}
FIRST = say("a") + say("b")
WRONG = {
    "usage of no token": (stream(say(usage=total(0)), DONE), "the answer has no token"),
    "nothing": (stream(), "the stream ended with no finish_reason and no .DONE."),
    "FIN in the middle": ([*GOOD[:4], FIN], "connection dropped"),
    "RST at once": ([RST], "connection dropped"),
    "more than its length": ([plain(FIRST)[0] + BODY], "the stream ended with no finish_reason"),
    "less than its length": ([plain()[0][:-150], FIN], "connection dropped"),
    "503": (status(b"503 Service Unavailable"), "HTTP 503: busy"),
    "JSON": (status(b"200 OK", b"{}", b"Content-Type: application/json\r\n"), "expected an event stream, got app"),
    "no JSON": (stream(*TOKENS[:3], b"data: {not\n\n", DONE), "an event is no JSON: '{not'"),
    "deep JSON": (stream(b"data: " + b"[" * 99_999 + b"\n\n", DONE), r"an event is no JSON: '\[\["),
    "usage in words": (stream(*TOKENS, say(usage=total("four")), DONE), "an event is no chunk of an answer"),
    "an error in the stream": (
        stream(*TOKENS[:3], b'data: {"error": {"message": "died"}}\n\n', DONE),
        "an error in the stream: died",
    ),
    "an event named error": (
        stream(*TOKENS[:3], b'event: error\ndata: {"message": "died"}\n\n', *TOKENS, DONE),
        "an error in the stream: died",
    ),
    "an error in a choice": (
        stream(*TOKENS[:3], say({"error": {"message": "died"}}), DONE),
        "an error in the stream: died",
    ),
    "an abort": (
        stream(*TOKENS[:3], say({"text": "", "finish_reason": "abort"}), DONE),
        "the server cut the answer: finish_reason 'abort'",
    ),
    "another protocol": ([b"SSH-2.0-X\r\n\r\n"], "answer: expected HTTP/1.1, got 'SSH-2.0-X'"),
    "a head with no end": ([b"HTTP/1.1 200 OK\r\nX: ", b"y" * 99_999], "answer: expected a head of at most 65536 "),
    "silence": ([9.0], "no end after 0.6 s"),
    "comments for ever": ([HEAD, *framed(b": ping\n\n", 0.02) * 400], "no end after 0.6 s"),
    "no end": (stream(*TOKENS[:4]), "the stream ended with no finish_reason and no .DONE."),
}


@pytest.fixture
def loaded(monkeypatch):
    """Runs a load of `count` requests, one after the other, and gives its exit status, record, failures and remarks."""
    monkeypatch.setattr(load_run, "undisturbed", nullcontext)  # a pass over the tests' heap takes 0.2 s
    monkeypatch.setattr(
        load_record.Environment, "now", lambda: SimpleNamespace(record_fields=lambda: {"environment": {}})
    )

    def call(play, plays=lambda number: number == 1, count=3, timeout_s=20.0, seen=None, **plan):
        with player(play, plays, seen) as url:
            data = Data(input_len=(3, 3), output_len=(4, 4))
            own = load_run.Plan(data=data, model="m", num_prompts=count, **plan)
            trace = load_run.run_load(Endpoint(url, "/v1/completions", timeout_s=timeout_s), own)
        record = load_record.record_of(trace, {"itl": 1000.0}, "r")
        with pytest.raises(Exit) if (status := load_record.exit_status(trace)) != "OK" else nullcontext() as ended:
            exit_for({status})
        return ended.value.exit_code if ended else 0, record, failures(trace), remarks(trace)

    return call


@pytest.mark.parametrize("name", RIGHT)
def test_an_odd_answer_that_is_whole_counts(loaded, name):
    status, record, failed, _ = loaded(RIGHT[name])
    assert (status, record.status, failed) == (0, "OK", {})
    assert (record.metrics["requests"], record.metrics["failed"], record.metrics["output_tokens"]) == (3, 0, 12)
    assert record.metrics["output_tokens_per_s"] > 0


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_costs_one_request_and_has_its_reason(loaded, name):
    play, reason = WRONG[name]
    status, record, failed, _ = loaded(play, timeout_s=0.6 if "0.6 s" in reason else 20.0)
    assert (status, record.status, list(failed.values())) == (11, "OK", [1]) and re.match(reason, *failed)
    assert (record.metrics["requests"], record.metrics["failed"], record.metrics["output_tokens"]) == (3, 1, 8)


def always(number):
    return True


SPREAD = "ITL and TPOT are spread evenly in 3 of 3 answers: no chunk says how many tokens it has"
ONE_CHUNK = "3 of 3 answers came in one chunk: they have no ITL and no TPOT, and meet no limit on them"


@pytest.mark.parametrize(
    "play, output_tokens, wanted",
    [
        (
            stream(say(ROLE), *TOKENS, say(usage=total(5)), DONE),
            15,
            ["3 of 3 answers have another length than asked: 12 tokens asked, 15 got"],
        ),  # with the token that ends the text
        (stream(say({"text": "abcd", "finish_reason": "length"}), USAGE, DONE), 12, [ONE_CHUNK]),
        (
            stream(*TOKENS[:3], say({"text": "", "finish_reason": "stop"}), DONE),
            6,
            [
                "3 of 3 answers have another length than asked: 12 tokens asked, 6 got; "
                "the server does not keep ignore_eos",
                "3 of 3 answers have no usage: each chunk counts as one token",
            ],
        ),
        (stream(TOKENS[0], TOKENS[-1], USAGE, DONE), 12, [SPREAD]),
    ],
)
def test_what_was_not_as_asked_or_not_measured_is_said(loaded, play, output_tokens, wanted):
    status, record, _, said = loaded(play, always)
    assert (status, record.metrics["output_tokens"], said) == (0, output_tokens, wanted)
    assert any(name.startswith(("itl", "tpot")) for name in record.metrics) == (said != [ONE_CHUNK])
    assert (record.metrics["goodput_requests_per_s"] == 0) == (said == [ONE_CHUNK])


BUSY = WRONG["503"][0]


def test_some_failures_are_counted_and_nearly_all_leave_no_rate(loaded):
    with pytest.raises(ValueError, match="url: expected an answer to the first request, got HTTP 503: busy"):
        loaded(BUSY, always)
    status, record, failed, _ = loaded(BUSY, lambda number: number % 5 == 1, 10)
    assert (status, record.status, failed, record.metrics["output_tokens"]) == (11, "OK", {"HTTP 503: busy": 2}, 32)
    status, record, failed, _ = loaded(BUSY, lambda number: number > 1, 11)
    assert (status, record.status, failed) == (11, "RUNTIME_ERROR", {"HTTP 503: busy": 10})
    assert record.reason.startswith("10 of 11 requests failed, so that there are no rates; most often: HTTP 503: busy")
    assert record.metrics["ttft_p50_ms"] > 0 and not any(name.endswith("per_s") for name in record.metrics)


def test_a_dead_server_ends_a_closed_loop(loaded):
    _, record, failed, _ = loaded([RST], lambda number: number > 0, 1000, concurrency=4)
    assert record.status == "RUNTIME_ERROR" and 20 <= record.metrics["requests"] < 25
    assert "connection dropped; the 20th in a row without an answer, so that the run ended" in failed


def test_every_request_goes_the_same_way(rooflab, monkeypatch):
    """Each request passes by the proxy of the environment, with the key."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with player([], lambda number: False, seen := []) as url:
        words = ("--api-key", "k", "--num-prompts", "2", "--output-len", "4")
        status, _, err = rooflab("load", "--url", url, *words)
        assert (status, len(seen)) == (0, 5), err
        status, _, err = rooflab("load", "--url", url.replace("//", "//user:pw@"))
        assert status == 2 and "--url: expected http://HOST:PORT" in err
    for fields, _ in seen:
        assert re.search(r"host: 127\.0\.0\.1:\d+\r\n", fields)
        assert "authorization: bearer k\r\n" in fields


def test_a_key_follows_no_redirect():
    def move(server, to):
        with server.accept()[0] as link:
            link.recv(9999)
            link.sendall(b"HTTP/1.0 302 Found\r\nLocation: %b/v1/models\r\n\r\n" % to.encode())

    with player([], always, seen := []) as other, socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=move, args=(server, other), daemon=True).start()
        asked = Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}", "", "k").get("/v1/models")
    assert asked[0] == 302 and not seen


def test_the_tokens_so_far_are_asked_for_until_the_server_refuses_them(loaded, monkeypatch):
    refusal = status(b"400 X", b'{"error": {"message": "unknown field: continuous_usage_stats"}}')
    for plays, wanted in ((lambda number: False, [True] * 4), (lambda number: number == 0, [True] + [False] * 4)):
        _, record, failed, _ = loaded(refusal, plays, seen=(seen := []))
        assert (record.status, failed) == ("OK", {})
        asked = [json.loads(body)["stream_options"] for _, body in seen if body]
        assert [options.get("continuous_usage_stats", False) for options in asked] == wanted
        assert all(options["include_usage"] for options in asked)

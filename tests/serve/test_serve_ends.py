"""How the OpenAI server ends: by a signal, with its engine, or before it starts; nothing is lost or left behind."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
import torch
import zmq
from needs import skip_without
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from served import WAIT_S, Served, served
from tiny_model import write_config

from rooflab.engine.serve.worker import run

GREEDY = {"model": "tiny", "temperature": 0}


@pytest.mark.more
def test_a_server_whose_engine_is_killed_says_so_to_all_and_ends(tmp_path):
    for number in range(2):
        with (
            served(tmp_path / str(number), "--threads", "1", "--timeout-s", "2") as server,
            ThreadPoolExecutor() as pool,
        ):
            server.engine.suspend()  # the time is up while the engine does not even take a request
            status, reply = server.ask("/v1/completions", {**GREEDY, "prompt": "x", "stream": number % 2 == 0})
            assert (status, reply["error"]["code"]) == (408, "timeout")
            server.engine.resume()

            def errors(stream, server=server):
                """What one client got and when, other than answers, until it was refused."""
                found, body = [], {**GREEDY, "prompt": [7], "max_tokens": 60, "ignore_eos": True, "stream": stream}
                while not found or found[-1][1] != "refused":
                    try:
                        status, reply = server.ask("/v1/completions", body)
                        found += [(time.monotonic(), status)] if "'error':" in str(reply) or '"error":' in reply else []
                    except (OSError, HTTPException):
                        found.append((time.monotonic(), "refused"))
                return found

            users = [pool.submit(errors, stream) for stream in (True, False) * 3]
            time.sleep(random.Random(number).uniform(0.2, 1))
            server.engine.kill()
            killed = time.monotonic()
            assert server.process.wait(WAIT_S) == 11
            for user in users:
                behind = [(at - killed, end) for at, end in user.result(WAIT_S) if at > killed]
                assert behind[0][0] < 5 and {end for _, end in behind} <= {200, 503, "refused"}, behind


@pytest.mark.more
def test_a_signal_cuts_what_takes_longer_than_the_drain(tmp_path, capfd):
    with served(tmp_path, "--drain-s", "1", "--threads", "1") as server, ThreadPoolExecutor() as pool:
        body = {**GREEDY, "max_tokens": 200, "ignore_eos": True, "prompt": [7]}
        asked = [pool.submit(server.ask, "/v1/completions", {**body, "stream": stream}) for stream in (True, False)]
        pool.submit(server.ask, "/live")
        while server.metric("vllm:num_requests_running") < 2:
            time.sleep(0.01)
        server.engine.suspend()
        server.process.send_signal(signal.SIGTERM)
        (_, stream), (_, whole) = [one.result(WAIT_S) for one in asked]
        server.engine.resume()
        assert server.process.wait(WAIT_S) == 0
        told = server.process.stdout.read()
    assert '"finish_reason":"abort"' in stream and stream.endswith("data: [DONE]\n\n")
    assert whole["choices"][0]["finish_reason"] == "abort" and "Traceback" not in capfd.readouterr().err
    assert "waiting up to 1 s for 2 answers; a second signal ends at once" in told


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_loads_has_its_port_alone_and_takes_its_engine_with_it(rooflab, tmp_path, number):
    skip_without("loopback")
    write_config(tmp_path / "tiny")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = ("serve", str(tmp_path / "tiny"), "--dummy", "--port", port)
    (folder := tmp_path / "t").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-m", "rooflab.bench", *options], env=environment) as process:
        engine = Served("", process).engine
        status, _, err = rooflab(*options)
        assert status == 2 and f"port: cannot listen on 127.0.0.1:{port}: Address already in use" in err
        process.send_signal(number)
        assert process.wait(WAIT_S) == -number
        engine.wait(WAIT_S)
        assert not list(folder.glob("rooflab-*"))


@pytest.fixture
def collector():
    """A collector of OpenTelemetry: its URL, and the spans that came."""
    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()


@pytest.mark.more
def test_limits_key_drain_and_traces(tmp_path, collector):
    endpoint, spans = collector
    options = ("--api-key", "--max-body-bytes", "2000", "--max-num-seqs", "1", "--max-queue", "1", "--max-tokens",
               "120", "--otlp-endpoint", endpoint, "--max-head-bytes", "3000")  # fmt: skip
    with served(tmp_path, *options, key="secret") as server:
        key = {"authorization": "Bearer secret", "traceparent": f"00-{'5' * 32}-{'7' * 16}-01"}
        status, body = server.ask("/v1/models", headers={"authorization": "Bearer wrong"})
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert server.ask("/v1/models", headers=key)[0] == server.ask("/health")[0] == 200
        assert server.ask("/v1/completions", b"x" * 2001, key)[0] == 413
        assert server.ask("/health", headers={"a": "x" * 3000})[0] == 431
        asked = {"model": "tiny", "prompt": "x"}
        for wrong in ({"max_tokens": 121}, {"n": 3}):  # three never fit
            assert server.ask("/v1/completions", {**asked, **wrong}, key)[0] == 400
        body = {**GREEDY, "prompt": "x", "max_tokens": 120, "stream": True}
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(server.ask, "/v1/completions", body, key)
            while not re.search(r"num_requests_running\{.*\} 1", server.ask("/metrics", headers=key)[1]):
                time.sleep(0.01)
            assert server.ask("/v1/completions", {**asked, "n": 2}, key)[0] == 429
            server.process.send_signal(signal.SIGTERM)
            _, text = whole.result(WAIT_S)
        assert '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":null') == 119 and server.process.wait(WAIT_S) == 0
    spans_are_whole(spans)


def spans_are_whole(spans):
    """The drained answer alone reached the engine; its phases follow one another and fill it."""
    (whole,) = [span for span in spans if span.name == "llm_request"]
    named = {each.key: each.value for each in whole.attributes}
    assert named["gen_ai.usage.output_tokens"].int_value == 120 and named["gen_ai.request.model"].string_value == "tiny"
    phases = [next(span for span in spans if span.name == name) for name in ("queue", "prefill", "decode")]
    assert len(spans) == 4 and {span.parent_span_id for span in phases} == {whole.span_id}
    edges = [whole.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert [span.start_time_unix_nano for span in phases] == edges[:3] and edges == sorted(edges)
    assert edges[3] == whole.end_time_unix_nano and abs(edges[3] / 1e9 - time.time()) < 60
    assert {span.trace_id.hex() for span in spans} == {"5" * 32} and whole.parent_span_id.hex() == "7" * 16


@pytest.mark.usefixtures("threads")
@pytest.mark.needs("loopback")
def test_an_engine_has_the_threads_that_it_is_given_and_says_that_it_has_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    count = torch.get_num_threads()
    with zmq.Context() as context, context.socket(zmq.DEALER) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        run(f"tcp://127.0.0.1:{port}", {"model": tmp_path / "none"}, count + 2)
        assert "expected a folder, a .gguf file, or --dummy with one of" in pickle.loads(server.recv()).reason
    assert torch.get_num_threads() == count + 2


def test_what_cannot_be_served_is_one_sentence(rooflab, tmp_path):
    status, _, err = rooflab("serve", str(tmp_path / "none.gguf"), "--port", "0")
    assert status == 2 and err.startswith("rooflab: model: ") and "Traceback" not in err

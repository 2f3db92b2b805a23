"""The OpenAI server: what it answers, what it refuses, and that nothing is lost or left behind."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import signal
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import aiohttp
import needs
import openai
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from playwright.sync_api import sync_playwright
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import WAIT_S, Served, served
from tiny_model import prompts, tiny_llm

from rooflab.engine.llm import SamplingParams
from rooflab.engine.serve.answers import Answer, Completion
from rooflab.engine.serve.texts import Numbers
from rooflab.engine.serve.wire import Token

OPTIONS = ("--num-kv-blocks", "300", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-queue", "80")
GREEDY = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("serve"), *OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The greedy tokens of each prompt of `prompts()`, by the engine alone."""
    llm = tiny_llm(tmp_path_factory.mktemp("expected"))
    return [out["token_ids"] for out in llm.generate(prompts(), SamplingParams(max_tokens=24))]


def ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_openais_client_gets_the_engines_tokens(client, expected):
    for prompt, wanted in zip(prompts(), expected, strict=True):
        whole = client.completions.create(prompt=prompt, max_tokens=24, **GREEDY)
        assert ids(whole.choices[0].text) == wanted
        assert whole.choices[0].finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 24)
        stream = client.completions.create(
            prompt=prompt, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        *chunks, last = list(stream)
        assert ids("".join(chunk.choices[0].text for chunk in chunks)) == wanted
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 23 + ["length"]  # a chunk, a token
        assert last.choices == [] and last.usage.completion_tokens == 24


def test_chats_through_openais_client(client):
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(messages=messages, max_completion_tokens=5, **GREEDY)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == len("Be brief.\nHi")
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}]
    chunks = list(client.chat.completions.create(messages=parts + messages[1:], max_tokens=5, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) == 6 and chunks[-1].choices[0].finish_reason == "length"


def test_several_prompts_and_answers_keep_their_indices(client, expected):
    both = client.completions.create(prompt=prompts()[:2], max_tokens=24, **GREEDY)
    assert [ids(choice.text) for choice in both.choices] == expected[:2]
    assert both.usage.prompt_tokens == sum(map(len, prompts()[:2])) and both.usage.completion_tokens == 48
    drawn = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=6, n=3, seed=4, temperature=1)
    again = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=6, n=3, seed=4, temperature=1)
    texts = [choice.text for choice in drawn.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 3
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]


def test_log_probabilities(client):
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}], max_tokens=3, logprobs=True, top_logprobs=2, **GREEDY
    )
    for each in chat.choices[0].logprobs.content:
        assert [top.logprob for top in each.top_logprobs][0] == each.logprob  # greedy: the likeliest was drawn
        assert len(each.top_logprobs) == 2 and each.top_logprobs[0].token == each.token
        assert bytes(each.bytes).decode() == each.token
    text = client.completions.create(prompt=[1, 2], max_tokens=3, logprobs=1, **GREEDY).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert text.logprobs.text_offset == [text.text.index(token) for token in text.logprobs.tokens]


def test_errors_through_openais_client(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as found:
        client.completions.create(model="tiny", prompt="x", temperature=9)
    assert found.value.param == "temperature" and found.value.type == "invalid_request_error"
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


WRONG = [
    ({"prompt": 5}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [5000]}, "prompt"), ({"prompt": [1] * 256}, "prompt"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 500}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -1}, "temperature"), ({"temperature": "1"}, "temperature"), ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"), ({"n": 0}, "n"), ({"n": 2, "temperature": 0}, "n"),
    ({"seed": 2**64}, "seed"), ({"stop": ""}, "stop"), ({"stop": ["a"] * 5}, "stop"), ({"stop": "a"}, "stop"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"), ({"logprobs": 21}, "logprobs"), ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"), ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"min_tokens": 17}, "min_tokens"), ({"ignore_eos": 1}, "ignore_eos"), ({"model": None}, "model"),
    ({"unknown": 1}, "unknown"), ({"priority": "high"}, "priority"),
]  # fmt: skip


def test_a_wrong_field_is_named_and_nothing_is_queued(server):
    for change, param in WRONG:
        status, body = server.ask("/v1/completions", {"model": "tiny", "prompt": [1], **change})
        assert (status, body["error"]["param"]) == (400, param), (change, body)
        assert param in body["error"]["message"] and "\n" not in body["error"]["message"]
    for messages in ([], [{"role": "user"}], [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{}]}]):
        status, body = server.ask("/v1/chat/completions", {"model": "tiny", "messages": messages})
        assert (status, body["error"]["param"]) == (400, "messages"), (messages, body)
    for raw in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": "tiny", "prompt": "x", "temperature": NaN}'):
        status, body = server.ask("/v1/completions", raw)
        assert status == 400 and body["error"]["message"], raw[:10]
    assert server.ask("/v1/nothing")[0] == 404 and server.ask("/v1/completions")[0] == 405
    assert server.ask("/health", headers={"host": "elsewhere.example"})[0] == 400  # a page that was rebound to us
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


def test_tokenize(server):
    assert server.ask("/tokenize", {"prompt": "Hi"}) == (200, {"count": 2, "max_model_len": 256, "tokens": [72, 105]})
    assert server.ask("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[1]["count"] == 2
    assert server.ask("/tokenize", {})[0] == 400


def test_stop_texts_end_an_answer_wherever_its_tokens_are_cut():
    params = SamplingParams(stop=("3 14",), max_tokens=9)
    answer = Answer(Completion(Numbers(99), "m"), params, 0)
    pieces = [answer.push(Token(0, 0, token, None, None)).text for token in (7, 3)]
    pieces.append(answer.push(Token(0, 0, 14, "stop", None)).text)
    assert "".join(pieces) == " 7 " and pieces[1] == " "  # what may begin a stop text is held back
    cut = Answer(Completion(Numbers(99), "m"), params, 0)
    cut.push(Token(0, 0, 3, None, None))
    assert (cut.cut().text, cut.cut().finish_reason) == ("3", "abort")


def test_steps_tell_what_they_did(server):
    prompt = [9] * 100  # longer than a step's budget of 64, and of 6 full pages
    server.ask("/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": 4})
    steps = server.ask("/steps")[1]["steps"][-5:]
    assert [step["prompt_tokens"] for step in steps] == [64, 36, 0, 0, 0]
    assert [step["num_decodes"] for step in steps] == [0, 0, 1, 1, 1]
    assert [step["tokens"] for step in steps] == [0, 1, 1, 1, 1]
    assert all(step["begin_s"] < step["end_s"] for step in steps)
    hits = server.metric("vllm:prefix_cache_hits_total")
    again = server.ask("/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": 4})[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert server.metric("vllm:prefix_cache_hits_total") == hits + 96


def test_metrics_count_what_was_answered(server):
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:inter_token_latency_seconds_count",
             "vllm:time_to_first_token_seconds_count", "vllm:request_success_total")  # fmt: skip
    before = [server.metric(name) for name in names]
    server.ask("/v1/completions", {**GREEDY, "prompt": [3, 4, 5], "max_tokens": 7})
    assert [server.metric(name) - old for name, old in zip(names, before, strict=True)] == [7, 3, 6, 1, 1]


async def _client(session, number: int, expected: list[list[int]], wrong: list[str], until: float) -> int:
    """One client until `until`: streams, leaves, sends nonsense, reads slowly; returns how many streams it ended."""
    draw, ended = random.Random(number), 0
    while time.monotonic() < until:
        which, leaves, slow = draw.randrange(8), draw.random() < 0.2, draw.random() < 0.1
        body = {**GREEDY, "prompt": prompts()[which], "max_tokens": 24, "stream": True}
        if draw.random() < 0.1:
            async with session.post("/v1/completions", json={**body, "top_p": draw.choice([7, "x", -1])}) as reply:
                wrong += [] if reply.status == 400 else [f"nonsense got {reply.status}"]
            continue
        found, reason = [], None
        async with session.post("/v1/completions", json=body) as reply:
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                found += ids(choice["text"])
                reason = choice["finish_reason"]
                await asyncio.sleep(0.05 if slow else 0)
                if leaves and len(found) > which:
                    break
        if found != expected[which][: len(found)] or not leaves and (len(found), reason) != (24, "length"):
            wrong.append(f"prompt {which}: {found} {reason}")
        ended += not leaves
    return ended


async def _soak(server: Served, expected: list[list[int]], seconds: float) -> tuple[int, list[str]]:
    wrong: list[str] = []
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(server.url, timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:
        until = time.monotonic() + seconds
        return sum(await asyncio.gather(*(_client(session, n, expected, wrong, until) for n in range(64)))), wrong


@pytest.mark.more
@pytest.mark.parametrize("seconds", [20, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_64_clients_that_leave_and_read_slowly_get_the_right_tokens(server, expected, seconds):
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    asyncio.run(_soak(server, expected, 2))
    before = sum(process.memory_info().rss for process in processes)
    ended, wrong = asyncio.run(_soak(server, expected, seconds))
    assert not wrong and ended >= 64
    end = time.monotonic() + 10  # those that left are noticed within a step
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") and (
        time.monotonic() < end
    ):
        time.sleep(0.1)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert sum(process.memory_info().rss for process in processes) < before + (64 << 20)


@pytest.mark.more
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_that_the_document_allows_or_forbids_breaks_it(server, mode):
    """Answers have the documented statuses and forms, whatever is asked."""
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    for operation in operations:
        if operation.path == "/live" or mode == GenerationMode.NEGATIVE and not operation.body:
            continue  # it has no end; it takes nothing

        @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"  # else nothing comes behind the name
            case.call_and_validate(
                checks=[
                    not_a_server_error,
                    status_code_conformance,
                    content_type_conformance,
                    response_schema_conformance,
                ]
            )

        ask()


@pytest.mark.more
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_tokens_and_the_engine_as_they_come(server, width):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=needs.browser(), args=["--no-sandbox"])
        page, heard = browser.new_page(viewport={"width": width, "height": 800}), []
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url) if server.url not in request.url else None)
        page.goto(server.url)
        page.wait_for_function("info !== null")
        page.fill("#prompt", "Hello")
        page.fill("#tokens", "150")
        page.click("#send")
        page.wait_for_function("gaps.length === 150 && !document.getElementById('send').disabled")
        page.wait_for_function("steps.length >= 150 && document.getElementById('running').textContent === '0'")
        assert len(ids(page.inner_text("#answer"))) == 150 and page.inner_text("#count") == "150"
        assert float(page.inner_text("#ttft")) > 0 and float(page.inner_text("#itl")) > 0
        assert "gemm" in page.inner_text("#ops") and "host" in page.inner_text("#ops")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.fill("#tokens", "9999")  # more than the context
        page.click("#send")
        page.wait_for_function("document.getElementById('error').textContent.includes('max_tokens')")
        heard = [text for text in heard if "400 (Bad Request)" not in text and not text.startswith("data:")]
        assert heard == []
        browser.close()


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


def test_limits_key_drain_and_traces(tmp_path, collector):
    endpoint, spans = collector
    options = ("--api-key", "--max-body-bytes", "2000", "--max-num-seqs", "1", "--max-queue", "1", "--max-tokens",
               "250", "--otlp-endpoint", endpoint)  # fmt: skip
    with served(tmp_path, *options, key="secret") as server:
        key = {"authorization": "Bearer secret", "traceparent": f"00-{'5' * 32}-{'7' * 16}-01"}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            status, body = server.ask("/v1/models", headers=headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert server.ask("/v1/models", headers=key)[0] == server.ask("/health")[0] == 200
        assert server.ask("/v1/completions", b"x" * 2001, key)[0] == 413
        assert server.ask("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 251}, key)[0] == 400
        assert server.ask("/v1/completions", {"model": "tiny", "prompt": "x", "n": 3}, key)[0] == 429
        place = server.url.removeprefix("http://").split(":")
        body = json.dumps({**GREEDY, "prompt": "x", "max_tokens": 250, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"traceparent: {key['traceparent']}\r\n"
        head += f"authorization: Bearer secret\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection((place[0], int(place[1])), timeout=WAIT_S) as connection:
            connection.sendall(head.encode() + body)
            text = connection.recv(100_000)
            server.process.send_signal(signal.SIGTERM)  # the answer has begun
            while part := connection.recv(100_000):
                text += part
        assert b'"finish_reason":"length"' in text and b"data: [DONE]" in text
        assert text.count(b'"finish_reason":null') == 249
        assert server.process.wait(WAIT_S) == 0
    # The drained answer alone reached the engine; its phases follow one another and fill it.
    (whole,) = [span for span in spans if span.name == "llm_request"]
    named = {each.key: each.value for each in whole.attributes}
    assert named["gen_ai.usage.output_tokens"].int_value == 250 and named["gen_ai.request.model"].string_value == "tiny"
    phases = [next(span for span in spans if span.name == name) for name in ("queue", "prefill", "decode")]
    assert len(spans) == 4 and {span.parent_span_id for span in phases} == {whole.span_id}
    edges = [whole.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert [span.start_time_unix_nano for span in phases] == edges[:3] and edges == sorted(edges)
    assert edges[3] == whole.end_time_unix_nano and abs(edges[3] / 1e9 - time.time()) < 60
    assert {span.trace_id.hex() for span in spans} == {"5" * 32} and whole.parent_span_id.hex() == "7" * 16


def test_what_cannot_be_served_is_one_sentence(rooflab, tmp_path):
    status, _, err = rooflab("serve", str(tmp_path / "none.gguf"), "--port", "0")
    assert status == 2 and err.startswith("rooflab: model: ") and "Traceback" not in err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, _, err = rooflab("serve", "smollm2-135m", "--port", str(taken.getsockname()[1]))
        assert status == 2 and "port: cannot listen" in err

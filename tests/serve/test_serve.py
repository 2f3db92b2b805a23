"""The OpenAI server: what it answers, what it refuses, and that a client that leaves harms no other."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace

import aiohttp
import httpx2
import needs
import openai
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from playwright.sync_api import sync_playwright
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import Served, served
from tiny_model import prompts, tiny_llm

from rooflab.engine.llm import SamplingParams
from rooflab.engine.pieces import TextStream
from rooflab.engine.serve.answers import Answer, CompletionBody
from rooflab.engine.serve.api import Service, make_app
from rooflab.engine.serve.client import TOKENS_AT_ONCE, Inbox
from rooflab.engine.serve.limits import Limits
from rooflab.engine.serve.texts import Numbers
from rooflab.engine.serve.wire import Ready, StepLine, Token
from rooflab.engine.stopping import StopText

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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dump", [False, True])
def test_a_chat_of_five_turns_in_the_clients_own_objects(client, stream, dump):
    messages = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"{turn}?"})
        asked = {"messages": messages, "max_tokens": 4, **GREEDY}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                list(events)
                message = events.current_completion_snapshot.choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message.model_dump() if dump else message)
    texts = [one["content"] if isinstance(one, dict) else one.content for one in messages]
    plain = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    last = client.chat.completions.create(messages=plain[:9], max_tokens=4, **GREEDY)
    assert last.choices[0].message.content == texts[9] and len(ids(texts[9])) == 4


def test_what_the_protocol_has_and_this_server_has_not(server):
    """Null and empty is taken; else the sentence says what there is."""
    nothing = {"tools": [], "functions": None, "audio": None, "reasoning_effort": None, "stop": [], "metadata": {},
               "logit_bias": {}, "prediction": None, "response_format": None, "user": "", "max_tokens": 1}  # fmt: skip
    silent = {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "id": 7}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}, silent], **nothing}
    assert server.ask("/v1/chat/completions", body)[0] == 200
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for message, words, param in (
        ({"role": "user", "content": [image]}, "'text' (there is nothing but text yet), got 'image_url'", "messages"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "(there are no tools yet), got 'tool'", "messages"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls (there are no tools yet)", "tool_calls"),
        ({"role": "user", "content": None}, "messages.0: expected content, got null", "messages"),
    ):
        status, reply = server.ask("/v1/chat/completions", {"model": "tiny", "messages": [message]})
        assert (status, reply["error"]["param"]) == (400, param) and words in reply["error"]["message"], reply
    for half in ({"model": "\ud800"}, {"prompt": "\ud800"}, {"\ud800": 1}, {"user": "\ud800"}):
        assert server.ask("/v1/completions", {"model": "tiny", "prompt": [1], **half})[0] == 400


def test_several_prompts_and_answers_keep_their_indices(client, expected):
    both = client.completions.create(prompt=prompts()[:2], max_tokens=24, **GREEDY)
    assert [ids(choice.text) for choice in both.choices] == expected[:2]
    assert both.usage.prompt_tokens == sum(map(len, prompts()[:2])) and both.usage.completion_tokens == 48
    drawn = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=6, n=3, seed=4, temperature=1)
    again = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=6, n=3, seed=4, temperature=1)
    texts = [choice.text for choice in drawn.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 3
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]


def test_prompts_of_one_request_enter_the_batch_together(server):
    server.ask("/v1/completions", {**GREEDY, "prompt": [[700 + number] for number in range(12)], "max_tokens": 1})
    last = server.ask("/steps")[1]["steps"][-1]
    assert (last["prompt_tokens"], last["tokens"]) == (12, 12)


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
    ({"prompt": [[1], [5000]]}, "prompt"),
    ({"min_tokens": 17}, "min_tokens"), ({"ignore_eos": 1}, "ignore_eos"), ({"model": None}, "model"),
    ({"unknown": 1}, "unknown"), ({"priority": "high"}, "priority"),
    # One above the bound:
    ({"prompt": "x" * 900_000}, "prompt"), ({"prompt": ["x"] * 2049}, "prompt"), ({"prompt": [[1]] * 97}, "n"),
    ({"prompt": [1] * (2**17 + 1)}, "prompt"), ({"n": 97}, "n"), ({"n": 129}, "n"), ({"model": "x" * 513}, "model"),
    ({"user": "x" * 513}, "user"), ({"stop": "x" * 1025}, "stop"), ({"stop": ["x" * 1025]}, "stop"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"), ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"), ({"top_k": 2**31}, "top_k"), ({"temperature": 2.1}, "temperature"),
    ({"seed": -(2**63) - 1}, "seed"), ({"priority": 1001}, "priority"), ({"max_tokens": 2**31}, "max_tokens"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"), ({"max_tokens": 256}, "max_tokens"),
]  # fmt: skip
RIGHT = [
    {"prompt": [1] * 255, "max_tokens": 1}, {"prompt": "x", "max_tokens": 255}, {"n": 96}, {"user": "x" * 512},
    {"stop_token_ids": [1] * 128}, {"logit_bias": {str(i): 100 - i for i in range(200)}}, {"top_k": 2**31 - 1},
    {"top_k": -1}, {"top_p": 0}, {"min_p": 1}, {"temperature": 2}, {"seed": -(2**63)}, {"seed": 2**63 - 1},
    {"priority": -1000}, {"priority": 1000}, {"repetition_penalty": 1e-6}, {"repetition_penalty": 2},
    {"presence_penalty": -2, "frequency_penalty": 2}, {"logprobs": 20}, {"min_tokens": 2}, {"logit_bias": {}},
]  # fmt: skip
WRONG_CHATS = [
    ({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ""}] * 2049}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 129}]}, "messages"),
    ({"messages": [{"role": "user", "content": "", "name": "x" * 513}]}, "messages"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"), ({"metadata": {"x" * 65: ""}}, "metadata"),
    ({"metadata": {"x": "x" * 513}}, "metadata"), ({"safety_identifier": "x" * 513}, "safety_identifier"),
    ({"prompt_cache_key": "x" * 513}, "prompt_cache_key"), ({"modalities": ["text", "text"]}, "modalities"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"max_completion_tokens": 255}, "max_completion_tokens"),
]  # fmt: skip


def test_a_wrong_field_is_named_and_nothing_is_queued(server):
    for change, param in WRONG:
        status, body = server.ask("/v1/completions", {"model": "tiny", "prompt": [1], **change})
        assert (status, body["error"]["param"]) == (400, param), (change, body)
        assert param in body["error"]["message"] and "\n" not in body["error"]["message"]
        assert len(body["error"]["message"]) < 300
    for change in RIGHT:
        status, body = server.ask("/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": 2, **change})
        assert status == 200, (change, body)
    for change, param in WRONG_CHATS:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **change}
        status, body = server.ask("/v1/chat/completions", body)
        assert (status, body["error"]["param"]) == (400, param), (change, body)
    for change, param in (({"prompt": "x" * 257}, "prompt"), ({"prompt": [1] * 256}, "prompt"),
                          ({"max_tokens": 256}, "max_tokens")):  # fmt: skip
        error = server.ask("/v1/completions", {"model": "tiny", "prompt": [1], **change})[1]["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    for raw in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": "tiny", "prompt": "x", "temperature": NaN}'):
        status, body = server.ask("/v1/completions", raw)
        assert status == 400 and body["error"]["message"], raw[:10]
    assert server.ask("/v1/nothing")[0] == 404 and server.ask("/v1/completions")[0] == 405
    assert server.ask("/health", headers={"host": "elsewhere.example"})[0] == 400  # a page that was rebound to us
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


def many(place: Callable[[dict[str, int]], dict[str, object]]) -> str:
    return json.dumps({"model": "m", **place({f"a{n}": 1 for n in range(75_000)})})


LONG = {  # bodies of 1 MiB
    "an unknown field": many(lambda fields: fields),
    "wrong keys": many(lambda fields: {"logit_bias": fields}),
    "unknown fields of a message": many(lambda fields: {"messages": [fields]}),
    "wrong ids": json.dumps({"model": "m", "prompt": [-1] * 300_000}),
    "many ids": json.dumps({"model": "m", "prompt": [1] * 130_000}),
    "lists": json.dumps({"model": "m", "prompt": [[]] * 300_000}),
    "a long stop text": json.dumps({"model": "m", "prompt": "x", "stop": "x" * 1_000_000}),
    "a long prompt": json.dumps({"model": "m", "prompt": "x" * 1_000_000}),
    "a long message": json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 1_000_000}]}),
}


async def _reply(app, path: str, body: str) -> tuple[httpx2.Response, float]:
    """A reply, and the longest time that the event loop's thread worked without another's turn."""
    headers, longest, last = {"content-type": "application/json"}, 0.0, time.thread_time()
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
        asking = client.request("POST" if body else "GET", path, content=body, headers=headers)
        asked = asyncio.ensure_future(asking)
        while not asked.done():
            await asyncio.sleep(0)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
        return await asked, longest


def test_no_request_holds_the_event_loop():
    """At most 50 ms on a quiet machine; it was seconds, and minutes for a stop text."""
    step = StepLine(1, 0.1, 0.2, 1, 9, 0, 0, 1, 0, 0, 1, 0, 0.0, {"gemm": 0.1})
    info = Ready("tiny", "cpu", "float32", 1024, 100_000, 4, 10_000, 16, [])
    engine = SimpleNamespace(info=info, steps=deque([step] * 20_000), calls={}, died=asyncio.Event(), ended=[])
    texts = SimpleNamespace(longest=1)  # it has no `encode`
    app = make_app(Service(engine, texts, "m", Limits(max_body_bytes=1 << 21)))
    gc.freeze()  # as the server
    for name, body in LONG.items():
        path = "/v1/chat/completions" if "message" in name else "/v1/completions"
        reply, longest_s = asyncio.run(_reply(app, path, body))
        assert reply.status_code == 400 and longest_s < 0.2, (name, reply, longest_s)
        assert len(reply.text) < 500 and reply.json()["error"]["param"], (name, reply.text)
    reply, longest_s = asyncio.run(_reply(app, "/steps", ""))
    gc.unfreeze()
    assert reply.json()["steps"] == [asdict(step)] * 20_000 and longest_s < 0.1
    inbox = Inbox()
    for _ in range(1000):
        inbox.put((None, Token(0, 0, 1, None, None)))
    assert len(asyncio.run(inbox.get())) == TOKENS_AT_ONCE


def test_the_time_of_a_stop_text_does_not_grow_with_its_length():
    for stop, tokens in (("1" * 20_000, [1] * 50), (" 1" * 10_000, [1] * 200), (" 1" * 50 + " 2", [1] * 200)):
        stopping = StopText([stop] * 4, Numbers(9).stream())
        began, text = time.thread_time(), ""
        for token in tokens:
            stopping.push(token)
            text += stopping.take(False)
        assert time.thread_time() - began < 0.5
        assert text + stopping.take(True) == " 1" * len(tokens)


def test_tokenize(server):
    assert server.ask("/tokenize", {"prompt": "Hi"}) == (200, {"count": 2, "max_model_len": 256, "tokens": [72, 105]})
    assert server.ask("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[1]["count"] == 2
    assert server.ask("/tokenize", {})[0] == 400


def test_stop_texts_end_an_answer_wherever_its_tokens_are_cut():
    params = SamplingParams(stop=("3 14",), max_tokens=9)
    answer = Answer(CompletionBody(Numbers(99), "m"), params, 0)
    pieces = [answer.push(Token(0, 0, token, None, None)).text for token in (7, 3)]
    pieces.append(answer.push(Token(0, 0, 14, "stop", None)).text)
    assert "".join(pieces) == " 7 " and pieces[1] == " "  # what may begin a stop text is held back
    cut = Answer(CompletionBody(Numbers(99), "m"), params, 0)
    cut.push(Token(0, 0, 3, None, None))
    assert (cut.cut().text, cut.cut().finish_reason) == ("3", "abort")


def test_offsets_are_those_of_the_text_whatever_is_held_back():
    """A stop text's beginning, parts of a character, one that is broken, and a token without a text."""
    pieces = [b"a", b"\xe2", b"\x98", b"\x83", b"", b" \xd2", b"b", b"\xe0", b"\x80", b"s", b"to", b"p"]
    texts = SimpleNamespace(stream=lambda: TextStream(pieces.__getitem__), named=lambda token: (str(token), b""))
    answer = Answer(CompletionBody(texts, "m"), SamplingParams(stop=("stop",), logprobs=0), 0)
    shown = [answer.push(Token(0, 0, at, "stop" if at == 11 else None, {at: -1.0})) for at in range(12)]
    assert "".join(piece.text for piece in shown) == b"".join(pieces[:9]).decode(errors="replace")
    assert [piece.logprobs["text_offset"] for piece in shown] == [[n] for n in (0, 1, 1, 1, 2, 2, 4, 5, 6, 7, 8, 10)]


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


async def _client(session, number: int, expected: list[list[int]], wrong: list[str], leaving: asyncio.Event) -> int:
    """One client until all of `_leavers` have left: streams, leaves, sends nonsense, reads slowly; returns how many
    streams it ended."""
    draw, ended = random.Random(number), 0
    while not leaving.is_set() or not ended:
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


async def _leavers(server: Served, count: int, left: asyncio.Event) -> None:
    """So many clients, 50 a second, that ask and close or reset their connection within 200 ms, whatever has come."""
    draw, place = random.Random(count), server.url.removeprefix("http://").split(":")

    async def one(delay_s: float, stay_s: float, stream: bool, resets: bool) -> None:
        await asyncio.sleep(delay_s)
        body = json.dumps({**GREEDY, "prompt": [7], "max_tokens": 200, "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        _, writer = await asyncio.open_connection(*place)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.sleep(stay_s)
        writer.transport.abort() if resets else writer.close()

    times = [(draw.uniform(0, count / 50), draw.uniform(0, 0.2)) for _ in range(count)]
    await asyncio.gather(*(one(*own, draw.random() < 0.7, draw.random() < 0.5) for own in times))
    left.set()


async def _soak(server: Served, expected: list[list[int]], leavers: int) -> tuple[int, list[str]]:
    wrong: list[str] = []
    limit, left = aiohttp.ClientTimeout(total=120), asyncio.Event()
    async with aiohttp.ClientSession(server.url, timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:
        users = (_client(session, number, expected, wrong, left) for number in range(64))
        ended, _ = await asyncio.gather(asyncio.gather(*users), _leavers(server, leavers, left))
        return sum(ended), wrong


@pytest.mark.parametrize("leavers", [
    150, pytest.param(300, marks=pytest.mark.more),
    pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
])  # fmt: skip
def test_beside_clients_that_leave_at_any_moment_64_get_the_right_tokens(server, expected, leavers):
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    if leavers > 150:
        asyncio.run(_soak(server, expected, 100))
    before = sum(process.memory_info().rss for process in processes)
    ended, wrong = asyncio.run(_soak(server, expected, leavers))
    assert not wrong and ended >= 64
    end = time.monotonic() + 10  # those that left are noticed within a step
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") and (
        time.monotonic() < end
    ):
        time.sleep(0.1)
    assert server.metric("vllm:kv_cache_usage_perc") == 0 == server.metric("vllm:num_requests_running")
    assert leavers == 150 or sum(process.memory_info().rss for process in processes) < before + (64 << 20)


@pytest.mark.more
@pytest.mark.parametrize("examples", [40, pytest.param(1500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_that_the_document_allows_or_forbids_breaks_it(server, mode, examples):
    """Answers have the documented statuses and forms, whatever is asked."""
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    for operation in operations:
        if operation.path == "/live" or mode == GenerationMode.NEGATIVE and not operation.body:
            continue  # it has no end; it takes nothing

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
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

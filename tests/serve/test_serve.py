"""The OpenAI server: its answers, its refusals, and a client that leaves without harm to other clients."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress

import aiohttp
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from served import Served, served
from tiny_model import prompts, tiny_llm

from rooflab.engine.llm import SamplingParams
from rooflab.kernels._waiting import run_times

OPTIONS = ("--num-kv-blocks", "300", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-queue", "80")
GREEDY = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("serve"), *OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    import openai

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
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) == 6
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content


def test_a_chat_takes_the_clients_own_object_of_an_answer(client):
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **GREEDY}
    with client.chat.completions.stream(**asked) as events:
        list(events)
        message = events.current_completion_snapshot.choices[0].message
    again = [
        client.chat.completions.create(**asked | {"messages": [*asked["messages"], one]}).choices[0].message.content
        for one in (message, {"role": "assistant", "content": message.content})
    ]
    assert again[0] == again[1] and len(ids(message.content)) == 4


def test_what_the_protocol_has_and_this_server_has_not(server):
    """Null and empty is taken; else the sentence says what there is."""
    nothing = {
        "tools": [],
        "functions": None,
        "audio": None,
        "reasoning_effort": None,
        "stop": [],
        "metadata": {},
        "logit_bias": {},
        "prediction": None,
        "response_format": None,
        "user": "",
        "max_tokens": 1,
    }
    silent = {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "id": 7}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}, silent], **nothing}
    assert server.ask("/v1/chat/completions", body)[0] == 200
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for message, words in (
        ({"role": "user", "content": [image]}, "there is nothing but text yet"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "there are no tools yet"),
        ({"role": "user", "content": None}, "messages.0: expected content, got null"),
    ):
        status, reply = server.ask("/v1/chat/completions", {"model": "tiny", "messages": [message]})
        assert status == 400 and words in reply["error"]["message"], reply


def test_several_prompts_and_answers_keep_their_indices(client, expected):
    both = client.completions.create(prompt=prompts()[:2], max_tokens=24, **GREEDY)
    assert [ids(choice.text) for choice in both.choices] == expected[:2]
    assert both.usage.prompt_tokens == sum(map(len, prompts()[:2])) and both.usage.completion_tokens == 48
    asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 6, "n": 3, "seed": 4, "temperature": 1}
    drawn, again = (client.completions.create(**asked).choices for _ in range(2))
    assert [choice.text for choice in drawn] == [choice.text for choice in again]
    assert [choice.index for choice in drawn] == [0, 1, 2] and len({choice.text for choice in drawn}) == 3


def test_log_probabilities(client):
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}], max_tokens=3, logprobs=True, top_logprobs=2, **GREEDY
    )
    for each in chat.choices[0].logprobs.content:
        likeliest, _ = each.top_logprobs
        assert (likeliest.token, likeliest.logprob) == (each.token, each.logprob)
        assert bytes(each.bytes).decode() == each.token
    text = client.completions.create(prompt=[1, 2], max_tokens=3, logprobs=1, **GREEDY).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert text.logprobs.text_offset == [text.text.index(token) for token in text.logprobs.tokens]


def test_errors_through_openais_client(client):
    import openai

    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as found:
        client.completions.create(model="tiny", prompt="x", temperature=9)
    assert (found.value.param, found.value.type) == ("temperature", "invalid_request_error")


WRONG = [
    ({"prompt": 5}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], [5000]]}, "prompt"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"), ({"temperature": "1"}, "temperature"), ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"), ({"n": 0}, "n"), ({"n": 2, "temperature": 0}, "n"),
    ({"stop": ""}, "stop"), ({"stop": ["a"] * 5}, "stop"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"), ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"), ({"stream": "yes"}, "stream"), ({"unknown": 1}, "unknown"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"min_tokens": 17}, "min_tokens"), ({"ignore_eos": 1}, "ignore_eos"), ({"model": None}, "model"),
    # One above the bound:
    ({"prompt": "x" * 900_000}, "prompt"), ({"prompt": ["x"] * 2049}, "prompt"), ({"prompt": [[1]] * 97}, "n"),
    ({"prompt": [1] * (2**17 + 1)}, "prompt"), ({"n": 97}, "n"), ({"n": 129}, "n"), ({"model": "x" * 513}, "model"),
    ({"user": "x" * 513}, "user"), ({"stop": ["x" * 1025]}, "stop"), ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"top_k": 2**31}, "top_k"), ({"temperature": 2.1}, "temperature"), ({"seed": 2**64}, "seed"),
    ({"priority": 1}, "priority"), ({"repetition_penalty": 2.1}, "repetition_penalty"),
]  # fmt: skip
RIGHT = [
    {"prompt": [1] * 255, "max_tokens": 1}, {"prompt": "x", "max_tokens": 255}, {"n": 96}, {"user": "x" * 512},
    {"stop_token_ids": [1] * 128}, {"logit_bias": {str(i): 100 - i for i in range(200)}}, {"top_k": 2**31 - 1},
    {"top_k": -1}, {"top_p": 0}, {"min_p": 1}, {"temperature": 2}, {"seed": -(2**63)}, {"echo": False},
    {"repetition_penalty": 2}, {"presence_penalty": -2, "frequency_penalty": 2}, {"logprobs": 20}, {"logit_bias": {}},
]  # fmt: skip
WRONG_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ""}] * 2049}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 129}]}, "messages"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 255}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
]


def test_a_wrong_field_is_named_and_nothing_is_queued(server):
    asked = {"model": "tiny", "prompt": [1]}, {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    for path, body, wrong in zip(("", "chat/"), asked, (WRONG, WRONG_CHATS), strict=True):
        for change, param in wrong:
            status, reply = server.ask(f"/v1/{path}completions", {**body, **change})
            assert (status, reply["error"]["param"]) == (400, param), (change, reply)
            said = reply["error"]["message"]
            assert param in said and "\n" not in said and len(said) < 300
    for change in RIGHT:
        status, body = server.ask("/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": 2, **change})
        assert status == 200, (change, body)
    for change, param in (
        ({"prompt": "x" * 257}, "prompt"),
        ({"prompt": [1] * 256}, "prompt"),
        ({"max_tokens": 256}, "max_tokens"),
    ):
        error = server.ask("/v1/completions", {"model": "tiny", "prompt": [1], **change})[1]["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    for raw in (
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": [1], "user": "\\ud800"}',
    ):
        status, body = server.ask("/v1/completions", raw)
        assert status == 400 and body["error"]["message"], raw[:10]
    assert server.ask("/v1/nothing")[0] == 404 and server.ask("/v1/completions")[0] == 405
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


def test_tokenize(server):
    assert server.ask("/tokenize", {"prompt": "Hi"}) == (200, {"count": 2, "max_model_len": 256, "tokens": [72, 105]})
    assert server.ask("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[1]["count"] == 2


def test_steps_tell_what_they_did(server):
    prompt = [9] * 100  # longer than a step's budget of 64, and of 6 full pages
    server.ask("/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": 4})
    lines = server.ask("/steps")[1]["steps"]
    steps = lines[-5:]
    assert [(one["prompt_tokens"], one["num_decodes"], one["tokens"]) for one in steps] == [
        (64, 0, 0),
        (36, 0, 1),
        (0, 1, 1),
        (0, 1, 1),
        (0, 1, 1),
    ]
    assert all(step["begin_s"] < step["end_s"] for step in steps)
    # Of a step of a millisecond the system may not tell.
    assert any(line["waited"] is not None for line in lines) == bool(run_times())
    hits = server.metric("vllm:prefix_cache_hits_total")
    again = server.ask("/v1/completions", {**GREEDY, "prompt": prompt, "max_tokens": 4})[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert server.metric("vllm:prefix_cache_hits_total") == hits + 96
    server.ask("/v1/completions", {**GREEDY, "prompt": [[700 + number] for number in range(12)], "max_tokens": 1})
    together = server.ask("/steps")[1]["steps"][-1]
    assert (together["prompt_tokens"], together["tokens"]) == (12, 12), "prompts of a request enter the batch together"


def test_metrics_count_what_was_answered(server):
    names = (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_success_total",
    )
    before = [server.metric(name) for name in names]
    server.ask("/v1/completions", {**GREEDY, "prompt": [3, 4, 5], "max_tokens": 7})
    assert [server.metric(name) - old for name, old in zip(names, before, strict=True)] == [7, 3, 6, 1, 1]


async def _client(session, number: int, expected: list[list[int]], rounds: int) -> list[str]:
    """One client: streams, leaves at any moment, sends nonsense, reads slowly; returns what was wrong."""
    draw, wrong = random.Random(number), []
    for _ in range(rounds):
        which, leaves, slow = draw.randrange(8), draw.random() < 0.5, draw.random() < 0.1
        stays = draw.randrange(24) if leaves else 25
        body = {**GREEDY, "prompt": prompts()[which], "max_tokens": 24, "stream": not leaves or draw.random() < 0.7}
        if draw.random() < 0.1:
            async with session.post("/v1/completions", json={**body, "top_p": draw.choice([7, "x", -1])}) as reply:
                wrong += [] if reply.status == 400 else [f"nonsense got {reply.status}"]
        found, reason = [], None
        with suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0, 0.2) if leaves else 120):
                async with session.post("/v1/completions", json=body) as reply:
                    async for line in reply.content:
                        if line.startswith(b"data: {") and len(found) < stays:
                            choice = json.loads(line[6:])["choices"][0]
                            found, reason = found + ids(choice["text"]), choice["finish_reason"]
                            await asyncio.sleep(0.05 if slow else 0)
        if found != expected[which][: len(found)] or (not leaves and (len(found), reason) != (24, "length")):
            wrong.append(f"prompt {which}: {found} {reason}")
    return wrong


async def _soak(server: Served, expected: list[list[int]], rounds: int) -> list[str]:
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(server.url, timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:
        users = (_client(session, number, expected, rounds) for number in range(64))
        return [one for wrong in await asyncio.gather(*users) for one in wrong]


@pytest.mark.parametrize("rounds", [4, pytest.param(12, marks=pytest.mark.more)])
def test_64_clients_of_which_some_leave_at_any_moment_get_the_right_tokens(server, expected, rounds):
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    held = lambda: sum(process.memory_info().rss for process in processes)
    if rounds > 4:
        asyncio.run(_soak(server, expected, min(rounds, 12)))
    before = held()
    assert asyncio.run(_soak(server, expected, rounds)) == []
    end = time.monotonic() + 10  # those that left are noticed within a step
    left = lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")
    while left() and time.monotonic() < end:
        time.sleep(0.1)
    assert server.metric("vllm:kv_cache_usage_perc") == 0 == left()
    assert rounds == 4 or held() < before + (64 << 20)


@pytest.mark.more
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_that_the_document_allows_or_forbids_breaks_it(server, mode):
    """Answers have the documented statuses and forms, whatever is asked."""
    import schemathesis
    from schemathesis import checks as checks_of
    from schemathesis.specs.openapi import checks as openapi_checks

    checks = [
        checks_of.not_a_server_error,
        openapi_checks.status_code_conformance,
        openapi_checks.content_type_conformance,
        openapi_checks.response_schema_conformance,
    ]
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    for operation in (found.ok() for found in document.get_all_operations()):
        if operation.path == "/live" or (mode == "negative" and not operation.body):
            continue  # it has no end; it takes nothing

        @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def ask(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"  # else nothing comes behind the name
            case.call_and_validate(checks=checks)

        ask()


@pytest.mark.more
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_tokens_and_the_engine_as_they_come(server, width, chromium):
    page, heard = chromium.new_page(viewport={"width": width, "height": 800}), []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if server.url not in request.url else None)
    page.goto(server.url)
    page.wait_for_function("info !== null")
    for name, text in (("#prompt", "Hello"), ("#tokens", "150")):
        page.fill(name, text)
    page.click("#send")
    page.wait_for_function("steps.length >= 150 && document.getElementById('running').textContent === '0'")
    assert len(ids(page.inner_text("#answer"))) == 150 and page.inner_text("#count") == "150"
    assert float(page.inner_text("#ttft")) > 0 and "gemm" in page.inner_text("#ops")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.fill("#tokens", "9999")  # more than the context
    page.click("#send")
    page.wait_for_function("document.getElementById('error').textContent.includes('max_tokens')")
    assert not [text for text in heard if "400 (Bad Request)" not in text and not text.startswith("data:")]

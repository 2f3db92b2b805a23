"""Arrivals, data, and whole runs against a server that only streams."""

import json
import math
from itertools import islice

import numpy as np
import pytest
from served import served, stub_server
from tiny_model import write_config

from rooflab.bench.core.record_files import read
from rooflab.bench.load.causes import spikes
from rooflab.bench.load.client import Endpoint
from rooflab.bench.load.data import Data
from rooflab.bench.load.load_run import Plan, run_load
from rooflab.bench.load.metrics import failures, remarks
from rooflab.bench.load.trace import load_trace


def offsets(count=20_000, *, rate):
    return np.array(Plan(rate=rate, num_prompts=count, seed=3).offsets())


def test_arrivals_are_a_poisson_process():
    assert offsets(5, rate=math.inf).tolist() == [0] * 5
    gaps = np.diff(offsets(rate=8.0))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05) and gaps.std() / gaps.mean() == pytest.approx(1, rel=0.05)


def drawn(count=400, seed=5, **options):
    return list(islice(Data(**options).prompts(seed), count))


def test_data_has_the_lengths_the_seed_and_shared_prefixes():
    asked = {"input_len": (3, 9), "output_len": (4, 4), "ids": (50, 60)}
    found = drawn(**asked)
    assert {prompt.tokens for prompt in found} == set(range(3, 10))
    assert {prompt.output_tokens for prompt in found} == {4}
    assert {token for prompt in found for token in prompt.content} == set(range(50, 61))
    assert found == drawn(**asked) != drawn(seed=6, **asked)
    (text,) = drawn(1, input_len=(7, 7), ids=None)
    assert len(text.content.split()) == 7 and text.tokens is None
    groups = drawn(kind="prefix", prefix_len=12, groups=3, input_len=(2, 2))
    assert len({tuple(prompt.content[:12]) for prompt in groups}) == 3 and {prompt.tokens for prompt in groups} == {14}


def test_sharegpt_has_its_mean_lengths():
    found = drawn(4000, kind="sharegpt", ids=None)
    lengths = np.array([(len(prompt.content.split()), prompt.output_tokens) for prompt in found])
    assert lengths.mean(0) == pytest.approx((161, 338), rel=0.08)
    assert lengths.min() >= 4 and lengths[:, 0].max() <= 1024 and lengths.sum(1).max() <= 2048


@pytest.fixture(scope="module")
def stub():
    with stub_server("--steps") as url:
        yield url


def ran(stub, endpoint="completions", path="/v1/completions", ids=(1, 9), manner=None, **plan):
    data = Data(input_len=(3, 3), output_len=(6, 6), ids=ids)
    extra = {"stub": manner or {}}
    return run_load(
        Endpoint(stub, path, timeout_s=20), Plan(data=data, endpoint=endpoint, model="stub", extra=extra, **plan)
    )


@pytest.mark.parametrize(
    "manner, counted", [({}, 1), ({"bundle": 2, "counted": "usage"}, 2), ({"bundle": 2, "counted": "logprobs"}, 2)]
)
def test_an_open_loop_is_traced_chunk_by_chunk(stub, manner, counted):
    trace = ran(stub, rate=200.0, num_prompts=12, manner=manner)
    assert len(trace.requests) == 12
    for request in trace.requests:
        texts = [chunk for chunk in request.chunks if chunk.kind == "text"]
        assert (request.error, request.prompt_tokens, request.output_tokens, len(texts)) == ("", 3, 6, 6 // counted)
        assert {chunk.tokens for chunk in texts} == ({counted} if "counted" in manner else {None})
        assert request.scheduled_s <= request.sent_s < request.first_byte_s <= texts[0].time_s
        assert request.chunks[-1].kind == "done" and request.chunks[-1].time_s <= request.end_s


def test_a_closed_loop_ends_with_its_requests(stub):
    trace = ran(stub, "chat", "/v1/chat/completions", None, concurrency=2, num_prompts=5)
    assert len(trace.requests) == 5 and all(request.chunks[0].kind == "role" for request in trace.requests)
    sent, ends = ([getattr(request, name) for request in trace.requests] for name in ("sent_s", "end_s"))
    assert max(sum(a <= at < b for a, b in zip(sent, ends, strict=True)) for at in sent) == 2


@pytest.mark.more
def test_a_preemption_of_our_own_server_is_seen(tmp_path):
    """Two requests of 34 + 35 tokens in 7 pages of 16: one of them loses its pages, and no prompt was known before."""
    with served(tmp_path, "--num-kv-blocks", "7", "--max-model-len", "80") as server:
        target = Endpoint(server.url, "/v1/completions")
        data = Data(input_len=(34, 34), output_len=(35, 35), ids=(1, 40))
        trace = run_load(target, Plan(concurrency=2, num_prompts=6, data=data, model="tiny"))
        assert not failures(trace) and not remarks(trace)
        assert "preemption" in {spike.kind for spike in spikes(trace)}
        assert server.metric("vllm:prefix_cache_hits_total") == 0 < server.metric("vllm:prefix_cache_queries_total")


@pytest.mark.more
def test_load_leaves_records_traces_and_figures(rooflab, stub, tmp_path):
    words = f"load --url {stub} --input-len 4 --output-len 8 --num-prompts 10 --seed 3 --json".split()
    asked = ("--rate", "100", "--out", "one", "--goodput", "ttft:9999")
    status, out, _ = rooflab(*words, "--extra-body", '{"stub": {"stall_at": 3, "stall_ms": 20}}', *asked)
    found, (record,) = json.loads(out), read(tmp_path / "one")
    # The machine of the tests may be too busy to send in time, which is NOISY and no failure.
    assert status == (0 if record.status == "OK" else 13) and record.status in ("OK", "NOISY")
    assert (record.kind, record.case_id, record.seed, record.case["model"]) == ("engine", "load", 3, "stub")
    assert record.case["rate_requests_per_s"] == 100 and record.case["goodput_ttft_ms"] == 9999
    assert record.metrics["requests"] == 10 and record.metrics["goodput_requests_per_s"] > 0
    assert not any("127.0.0.1" in str(value) for value in record.case.values())
    assert found["failures"] == [{}]
    assert (tmp_path / "one" / "waterfall.png").stat().st_size > 10_000
    assert len(load_trace(tmp_path / "one" / "trace.ndjson").steps) >= 10


@pytest.mark.more
def test_a_sweep_has_a_record_and_a_seed_for_each_rate(rooflab, stub, tmp_path):
    words = f"load --url {stub} --output-len 8 --num-prompts 10 --seed 3 --sweep 80,160 --out two --json"
    assert [row["rate"] for row in json.loads(rooflab(*words.split())[1])["rows"]] == ["80", "160"]
    assert [record.seed for record in read(tmp_path / "two")] == [3, 4]


@pytest.mark.parametrize("words, message", [
    ("--url ftp://x", "url: expected http://HOST:PORT"), ("--url http://127.0.0.1:9", "url: expected a server at"),
    ("--rate 0", "rate: expected"), ("--rate 1 --sweep 1,2", "sweep: expected one of"),
    ("--sweep 1,x", "sweep: expected"),
    ("--sweep 1,1", "sweep: expected finite rates, each once"),
    ("--warmup 0", "warmup: expected"), ("--num-prompts 0", "--num-prompts: expected"),
    ("--input-len 9:3", "--input-len: expected"), ("--input-len few", "--input-len: expected"),
    ("--data sonnet", "data: expected one of"), ("--endpoint embeddings", "endpoint: expected one of"),
    ("--extra-body []", "--extra-body: expected"), ("--goodput ttft", "goodput: expected"),
    ("--timeout 0", "timeout: expected"),
])  # fmt: skip
def test_bad_input_is_one_sentence(rooflab, words, message):
    status, out, err = rooflab("load", *words.split())
    assert (status, out) == (2, "") and "Traceback" not in err and message in err


def test_the_same_ruler_in_process(rooflab, tmp_path):
    config = write_config(tmp_path)
    words = f"latency --model {config} --dummy --device cpu --input-len 9 --output-len 5 --batch-size 3 --out r --json"
    status, out, _ = rooflab(*words.split())
    found, (record,) = json.loads(out), read(tmp_path / "r")
    assert status == 0 and (found["num_requests"], found["num_output_tokens"]) == (3, 15)
    assert record.case_id == "latency" and record.metrics["itl_p50_ms"] == found["itl_p50_ms"] > 0
    assert rooflab("latency", "--model", config, "--dummy", "--batch-size", "0")[0] == 2

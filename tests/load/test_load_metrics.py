"""Metrics of hand-made traces against numbers worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rooflab.bench.load import load_record
from rooflab.bench.load.causes import cause
from rooflab.bench.load.metrics import check_limits, failures, summarize, times_of
from rooflab.bench.load.trace import Request, StreamEvent, Trace, load_trace

ONE = Request(
    index=0,
    scheduled_s=0.0,
    sent_s=0.1,
    first_byte_s=0.15,
    end_s=0.7,
    prompt_tokens=10,
    output_tokens=3,
    finish_reason="length",
    chunks=tuple(
        StreamEvent(*chunk)
        for chunk in ((0.2, "role"), (0.3, "text"), (0.5, "text"), (0.6, "text"), (0.65, "usage"), (0.7, "done"))
    ),
)
BUNDLED = replace(
    ONE,
    index=1,
    scheduled_s=1.0,
    sent_s=1.0,
    end_s=1.5,
    output_tokens=5,
    chunks=(StreamEvent(1.1, "text", 2), StreamEvent(1.4, "text", 3), StreamEvent(1.5, "done")),
)
TRACE = Trace(-0.1, 0.0, (ONE,))
FAILED = replace(ONE, index=2, chunks=(), error="connection dropped", output_tokens=None)


def test_our_own_times():
    times, bundled = times_of(ONE), times_of(BUNDLED)
    assert (times.ttft_ms, times.ttft_sent_ms) == pytest.approx((300, 200))
    assert (times.e2e_ms, times.e2e_sent_ms, times.tpot_ms) == pytest.approx((600, 500, 150))
    assert times.itl_ms == pytest.approx([200, 100]) and times.token_times_s == pytest.approx([0.3, 0.5, 0.6])
    assert bundled.itl_ms == pytest.approx([100] * 3) and bundled.chunk_gap_ms == pytest.approx([300])
    assert bundled.tpot_ms == pytest.approx(100) and len(bundled.token_times_s) == 5 and times_of(FAILED) is None
    single = times_of(replace(ONE, chunks=ONE.chunks[:2], output_tokens=16))
    assert single.tpot_ms is None and len(single.itl_ms) == 0 and single.meets({"ttft": 301, "e2e": 301})
    assert not single.meets({"tpot": 9e9}) and not single.meets({"itl": 9e9})


def test_a_summary_counts_failures():
    trace = Trace(-0.1, 1.2, (ONE, BUNDLED, FAILED))
    found = summarize(trace, {"itl": 150.0, "ttft": 400.0})
    assert (found["requests"], found["failed"], found["output_tokens"], found["prompt_tokens"]) == (3, 1, 8, 20)
    assert found["seconds"] == pytest.approx(1.4) and found["output_tokens_per_s"] == pytest.approx(8 / 1.4)
    # Until the last arrival at 1.2 s came three tokens of the first request and two of the second.
    assert found["steady_output_tokens_per_s"] == pytest.approx(5 / 1.2)
    times = found["ttft_p50_ms"], found["ttft_p99_ms"], found["ttft_sent_p50_ms"]
    assert times == pytest.approx((200, 298, 150))
    assert found["itl_mean_ms"] == pytest.approx((200 + 100 + 300) / 5)
    assert found["goodput_requests_per_s"] == pytest.approx(1 / 1.4)  # one gap of the first is 200 ms
    assert found["client_late_mean_ms"] == pytest.approx(200 / 3)
    assert failures(trace) == {"connection dropped": 1}
    assert summarize(replace(trace, requests=(FAILED,))) == {"requests": 1, "failed": 1}


def test_limits_hold_all_together():
    of_one = {"ttft": 300, "itl": 200, "tpot": 150, "e2e": 600}
    above = {name: limit + 0.1 for name, limit in of_one.items()}
    assert times_of(ONE).meets(above)
    assert not any(times_of(ONE).meets({**above, name: limit - 0.1}) for name, limit in of_one.items())
    assert check_limits(["ttft:500", "itl:50.5"]) == {"ttft": 500, "itl": 50.5}
    for wrong in (["ttft"], ["p99:3"], ["itl:0"], ["itl:nan"], ["itl:5", "itl:6"]):
        with pytest.raises(ValueError, match=f"goodput: expected NAME:MILLISECONDS.*got '{wrong[-1]}'"):
            check_limits(wrong)


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trace = Trace(-0.1, 1.2, (ONE, BUNDLED, FAILED), {"model": "m"}, ({"number": 1},))
    assert load_trace(trace.save(tmp_path / "t.ndjson")) == trace
    assert load_trace(TRACE.save(tmp_path / "t.ndjson")) == TRACE
    for wrong in ("", "{}", '{"trace": 1}', "x", '{"trace": 2, "begin_s": 1, "steps": null}'):
        (tmp_path / "w").write_text(wrong)
        with pytest.raises(ValueError, match="trace: expected a trace of `rooflab load`, got "):
            load_trace(tmp_path / "w")


def step(begin, end, **what):
    plain = {"prompt_tokens": 0, "preempted": 0, "evicted": 0, "waited": 0.0}
    return {"begin_s": begin, "end_s": end, **plain, **what}


@pytest.mark.parametrize(
    "steps, wanted",
    [
        ([step(0, 1, prompt_tokens=512)], "unknown"),  # before the gap
        ([step(1, 1.1), step(1.1, 3, prompt_tokens=512, evicted=3)], "prefill of 512 tokens"),
        ([step(1, 2.9, prompt_tokens=64), step(2.9, 3, prompt_tokens=8)], "prefill of 64 tokens"),
        ([step(1, 2.9, prompt_tokens=64), step(2.9, 3, preempted=1)], "preemption"),
        ([step(1, 3, evicted=2)], "unknown"),
        ([step(1, 3, waited=0.2)], "another process"),
        ([step(1, 3, waited=0.04), step(1, 3, waited=None)], "unknown"),
    ],
)
def test_the_cause_of_a_gap(steps, wanted):
    assert cause(1.5, 3.0, steps) == wanted


def test_a_record_of_nothing_answered_is_a_failure(monkeypatch):
    monkeypatch.setattr(
        load_record.Environment, "now", lambda: SimpleNamespace(record_fields=lambda: {"environment": {}})
    )
    record = load_record.record_of(replace(TRACE, requests=(FAILED,)), {}, "r")
    assert (record.status, record.reason) == ("RUNTIME_ERROR", "no request was answered: connection dropped")
    assert np.isclose(load_record.record_of(TRACE, {}, "r").metrics["ttft_p50_ms"], 300)

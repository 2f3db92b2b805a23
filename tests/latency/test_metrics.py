"""TTFT, ITL, TPOT and other metrics on times that can be computed by hand."""

import pytest

from rooflab.engine.metrics import Timeline, summarize


def test_definitions():
    timeline = Timeline(10.0, (10.5, 10.6, 10.8, 11.1))
    assert timeline.ttft_ms == pytest.approx(500)
    assert timeline.itl_ms.tolist() == pytest.approx([100, 200, 300])  # the first token is not among them
    assert timeline.tpot_ms == pytest.approx(200)
    assert timeline.e2e_ms == pytest.approx(1100)


def test_one_token_has_no_gap():
    timeline = Timeline(0.0, (0.25,))
    summary = summarize([timeline], 7)
    assert timeline.tpot_ms is None and timeline.itl_ms.size == 0
    assert (summary.itl_p50_ms, summary.tpot_mean_ms, summary.ttft_p99_ms) == (None, None, 250.0)
    assert (summary.num_prompt_tokens, summary.output_tokens_per_s) == (7, 4.0)


def test_itl_is_pooled_and_tpot_is_one_value_a_request():
    fast = Timeline(0.0, (1.0, 1.1, 1.2, 1.3, 1.4))  # four gaps of 100 ms
    slow = Timeline(1.0, (2.0, 3.0))  # one gap of 1 s
    summary = summarize([fast, slow], 2)
    assert summary.itl_p50_ms == pytest.approx(100)
    assert summary.tpot_mean_ms == pytest.approx(550)
    assert summary.itl_p90_ms == pytest.approx(640)  # linear between the 4th and 5th of five gaps
    assert summary.output_tokens_per_s == pytest.approx(7 / 3)
    assert summary.ttft_p50_ms == pytest.approx(1000) and summary.num_output_tokens == 7

"""Measures how the time of the next token depends on the length of the text, with and without a KV cache."""

from __future__ import annotations

from typing import Any

from rooflab.bench.latency.ledger import draw_prompts, seconds_of, stepping
from rooflab.bench.latency.study import Lab, Study, at_least, at_most, spread, worst
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.study import StudyOptions


def run(lab: Lab) -> Study:
    """Measures the time of the next token after texts of several lengths, with and without a KV cache.

    Without a cache, the engine computes the whole text again for each token.  So the prediction is the text's prefill
    time.  The verdict requires that this time grows with the text, and that the time with a cache does not."""
    lengths = (16, 32) if lab.quick else (32, 64, 128, 256)
    llm_options = {"max_model_len": lengths[-1] + 64, "max_num_seqs": 1, "prefix_caching": False, "num_kv_blocks": 64}
    cached_llm, uncached_llm = lab.llm(**llm_options), lab.llm(**llm_options, study=StudyOptions(kv_cache=False))
    samples: dict[int, list[tuple[float, ...]]] = {length: [] for length in lengths}
    for _ in range(lab.size(7, 2)):
        for length in lengths:
            samples[length].append(_times(cached_llm, uncached_llm, draw_prompts(uncached_llm, 1, length, seed=0)[0]))
    rows: list[dict[str, Any]] = []
    for length in lengths:
        (cached_ms, *_), (prefill_ms, *_), (uncached_ms, low, high_ms) = map(spread, zip(*samples[length], strict=True))
        row = {"tokens": length, "cache_ms": cached_ms, "no_cache_ms": uncached_ms, "low_ms": low, "high_ms": high_ms}
        rows.append(row | {"predicted_ms": prefill_ms})
    saved_time_share = 1 - rows[-1]["cache_ms"] / rows[-1]["no_cache_ms"]
    time_ratios = [rows[-1][time_column] / rows[0][time_column] for time_column in ("cache_ms", "no_cache_ms")]
    growth = lengths[-1] / lengths[0]
    return Study(
        claim="The KV cache saves O(n^2): a token costs the same however long the text is",
        source="introductions to LLM inference, such as Pope et al., arXiv 2211.05102",
        rows=rows,
        verdict=worst(at_most(time_ratios[0], 1.25, 2.0), at_least(time_ratios[1], growth / 2, 1.5)),
        number=f"with {growth:g} times the tokens a token takes {time_ratios[0]:.2f} times as long with the cache, and "
        f"{time_ratios[1]:.1f} times without; at {lengths[-1]} tokens the cache saves {saved_time_share:.0%}",
        about=lab.about(cached_llm),
        x="tokens",
        curves={"without": "no_cache_ms", "without, predicted": "predicted_ms", "with the cache": "cache_ms"},
        x_label="tokens before",
        y_label="ms a token",
        band=("low_ms", "high_ms"),
        log=True,
    )


def _times(with_cache: LLM, without: LLM, prompt: list[int]) -> tuple[float, float, float]:
    """Measures the ms of one token with a KV cache, of the prefill of `prompt`, and of one token without a KV cache."""
    with stepping(with_cache, "decode", 1, len(prompt), 5) as engine_step:
        cached_s, *_ = spread([seconds_of(engine_step) for _ in range(5)])
    with stepping(with_cache, "prefill", 1, len(prompt), 1) as engine_step:
        prefill_s = seconds_of(engine_step)
    without.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    return 1e3 * cached_s, 1e3 * prefill_s, 1e3 * seconds_of(without.step)

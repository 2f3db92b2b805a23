"""Measures how much TTFT a prefix cache saves if several prompts begin with the same tokens."""

from __future__ import annotations

from typing import Any

from rooflab.bench.latency.ledger import draw_prompts
from rooflab.bench.latency.study import Lab, Study, at_least, run_all_s, spread
from rooflab.engine.llm import SamplingParams

SUFFIX_TOKENS = 16
"""The number of tokens after the prefix."""


def run(lab: Lab) -> Study:
    """Measures how much a cached prefix shortens the TTFT of prompts.

    With the cache, the engine computes only the tokens after the prefix.  The study predicts that the TTFT falls in
    proportion to the number of computed tokens."""
    prefixes = (16, 32) if lab.quick else (64, 128, 256, 448)
    llm = lab.llm(max_model_len=prefixes[-1] + 64, max_num_seqs=4, num_kv_blocks=2048)
    rows: list[dict[str, Any]] = []
    for prefix_len in prefixes:
        prompts = draw_prompts(llm, lab.size(8, 2) + 1, prefix_len + SUFFIX_TOKENS, seed=prefix_len)
        shared_prefix, ttfts_ms = prompts[0][:prefix_len], dict[str, list[float]](cold=[], warm=[])
        for prompt in prompts:
            for cache_state, token_ids in (("cold", prompt), ("warm", shared_prefix + prompt[prefix_len:])):
                llm.add_request(token_ids, SamplingParams(max_tokens=1, ignore_eos=True))
                ttfts_ms[cache_state].append(1e3 * run_all_s(llm))
        # The first prompt puts the prefix into the cache.
        cold_ttft_ms, warm_ttft_ms = (spread(prompt_times[1:]) for prompt_times in ttfts_ms.values())
        row = {
            "prefix": prefix_len,
            "cold_ms": cold_ttft_ms[0],
            "warm_ms": warm_ttft_ms[0],
            "low_ms": warm_ttft_ms[1],
            "high_ms": warm_ttft_ms[2],
        }
        rows.append(row | {"predicted_warm_ms": cold_ttft_ms[0] * SUFFIX_TOKENS / (prefix_len + SUFFIX_TOKENS)})
    last_row, cached_tokens_share = rows[-1], prefixes[-1] / (prefixes[-1] + SUFFIX_TOKENS)
    saving = 1 - last_row["warm_ms"] / last_row["cold_ms"]
    return Study(
        claim="A cached prefix makes the TTFT that of the rest of the prompt",
        source="SGLang (Zheng et al., arXiv 2312.07104)",
        rows=rows,
        verdict=at_least(saving / cached_tokens_share, 0.85, 0.5),
        number=f"with {prefixes[-1]} of {prefixes[-1] + SUFFIX_TOKENS} tokens cached the TTFT falls by {saving:.0%} "
        f"({cached_tokens_share:.0%} of the tokens are not computed)",
        about=f"{lab.about(llm)}, {SUFFIX_TOKENS} tokens behind the prefix",
        x="prefix",
        curves={
            "prefix cached": "warm_ms",
            "prefix cached, predicted": "predicted_warm_ms",
            "nothing cached": "cold_ms",
        },
        x_label="tokens of the prefix",
        y_label="TTFT (ms)",
        band=("low_ms", "high_ms"),
    )

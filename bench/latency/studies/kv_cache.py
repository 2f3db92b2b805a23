"""Does the KV cache make a token's time independent of the tokens before it?"""

from __future__ import annotations

from rooflab.bench.latency.ledger import seconds_of, stepping
from rooflab.bench.latency.step_model import Work
from rooflab.bench.latency.study import Curve, Lab, Study, judged, spread
from rooflab.engine.llm import SamplingParams


def run(lab: Lab) -> Study:
    """Time of the next token against the tokens before it, with the cache and without.

    Without it the whole text is computed for each token: predicted is the prefill of as many tokens.
    """
    lengths = (16, 32) if lab.quick else (32, 64, 128, 256)
    few = lab.size(5, 2)
    options = {"max_model_len": lengths[-1] + 64, "max_num_seqs": 1, "prefix_caching": False, "num_kv_blocks": 64}
    with_cache, without = lab.llm(**options), lab.llm(**options, kv_cache=False)
    rows = []
    for length in lengths:
        with stepping(with_cache, "decode", 1, length, few) as step:
            own, *_ = spread([seconds_of(step) for _ in range(few)])
        with stepping(with_cache, "prefill", 1, length, few) as step:
            prefill, *_ = spread([seconds_of(step) for _ in range(few)])
        (prompt,) = lab.prompts(without, 1, length)
        without.add_request(prompt, SamplingParams(max_tokens=few, ignore_eos=True))
        samples = []
        while without.has_work:
            samples.append(seconds_of(without.step))
        again, low, high = spread(samples)
        h100 = [
            1e3 * lab.h100.seconds(work) for work in (Work(1, 8 * length, (), 1), Work(0, 0, ((0, 8 * length),), 1))
        ]
        rows.append({
            "tokens": length, "cache_ms": 1e3 * own, "no_cache_ms": 1e3 * again, "low_ms": 1e3 * low,
            "high_ms": 1e3 * high, "predicted_ms": 1e3 * prefill, "h100_cache_ms": h100[0], "h100_no_cache_ms": h100[1],
        })  # fmt: skip
    saved = 1 - rows[-1]["cache_ms"] / rows[-1]["no_cache_ms"]
    growth = [rows[-1][name] / rows[0][name] for name in ("cache_ms", "no_cache_ms")]
    steps = lengths[-1] / lengths[0]
    return Study(
        name="kv-cache",
        claim="The KV cache saves O(n^2): a token costs the same however long the text is",
        source="introductions to LLM inference, such as Pope et al., arXiv 2211.05102",
        rows=rows,
        verdict=judged(growth[1] / growth[0], steps / 2, 1.5),
        number=f"with {steps:g} times the tokens a token takes {growth[0]:.2f} times as long with the cache, and "
        f"{growth[1]:.1f} times without; at {lengths[-1]} tokens the cache saves {saved:.0%}",
        curves=(
            Curve("with the cache", lengths, [row["cache_ms"] for row in rows]),
            Curve("without", lengths, [row["no_cache_ms"] for row in rows],
                  low=[row["low_ms"] for row in rows], high=[row["high_ms"] for row in rows]),
            Curve("without, predicted", lengths, [row["predicted_ms"] for row in rows], dashed=True),
            Curve("with the cache", [8 * n for n in lengths], [row["h100_cache_ms"] for row in rows], 1),
            Curve("without", [8 * n for n in lengths], [row["h100_no_cache_ms"] for row in rows], 1),
        ),
        x="tokens before", y="ms a token", log=True, about=lab.about(with_cache),
    )  # fmt: skip

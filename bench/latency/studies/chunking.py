"""Measures how chunked prefill of one long prompt changes the inter-token latency (ITL) of other sequences."""

from __future__ import annotations

from typing import Any

from rooflab.bench.latency.ledger import draw_prompts, seconds_of
from rooflab.bench.latency.study import Lab, Study, at_least, at_most, run_all_s, spread, worst
from rooflab.engine.llm import LLM, SamplingParams


def run(lab: Lab) -> Study:
    """Measures the effect of the prefill's chunk size on one long prompt and on four sequences that decode.

    It measures the longest gap between two tokens of a decoding sequence, and the prompt's TTFT.  The prediction
    assumes that a step's time is proportional to its tokens.  Then smaller chunks shorten only the gap."""
    prompt_len, num_decodes = lab.size(512, 48), 4
    chunks = (16, 48) if lab.quick else (32, 64, 128, 512)
    llm = lab.llm(max_model_len=prompt_len + 64, max_num_seqs=num_decodes + 1, num_kv_blocks=1024, prefix_caching=False)
    rows: list[dict[str, Any]] = []
    for chunk in chunks:
        params = SamplingParams(max_tokens=prompt_len // chunks[0] + 24, ignore_eos=True)
        # The first turn allocates.
        tries_ms = [_steps_ms(llm, chunk, prompt_len, num_decodes, params, repeat) for repeat in range(lab.size(4, 2))][
            1:
        ]
        gap_ms, ttft_ms = spread([max(steps) for steps in tries_ms]), spread([sum(steps) for steps in tries_ms])
        rows.append(
            {"chunk": chunk, "gap_ms": gap_ms[0], "low_ms": gap_ms[1], "high_ms": gap_ms[2], "ttft_ms": ttft_ms[0]}
        )
    for row in rows:
        row |= {"predicted_gap_ms": rows[-1]["gap_ms"] * (row["chunk"] + num_decodes) / (prompt_len + num_decodes)}
        row |= {"predicted_ttft_ms": rows[-1]["ttft_ms"]}
    gap_ratio = rows[-1]["gap_ms"] / rows[0]["gap_ms"]
    ttft_ratio = rows[0]["ttft_ms"] / rows[-1]["ttft_ms"]
    return Study(
        claim="Chunked prefill takes the spikes out of others' ITL at little cost",
        source="Sarathi-Serve (Agrawal et al., OSDI 2024)",
        rows=rows,
        verdict=worst(at_least(gap_ratio, 4.0, 1.5), at_most(ttft_ratio, 1.5, 3.0)),
        number=f"chunks of {chunks[0]} make the longest gap {gap_ratio:.1f} times shorter ({rows[0]['gap_ms']:.0f} for "
        f"{rows[-1]['gap_ms']:.0f} ms), and the long prompt's own TTFT {ttft_ratio:.2f} times as long",
        about=f"{lab.about(llm)}, a prompt of {prompt_len} tokens beside {num_decodes}",
        x="chunk",
        curves={
            "longest gap of others": "gap_ms",
            "longest gap of others, predicted": "predicted_gap_ms",
            "TTFT of the long prompt": "ttft_ms",
            "TTFT of the long prompt, predicted": "predicted_ttft_ms",
        },
        x_label="tokens of a chunk",
        y_label="ms",
        band=("low_ms", "high_ms"),
        log=True,
    )


def _steps_ms(llm: LLM, chunk: int, long: int, others: int, answer: SamplingParams, turn: int) -> list[float]:
    """Returns the ms of each engine step while a long prompt is prefilled in chunks and `others` sequences decode."""
    llm.scheduler.prefill_chunk = long
    for prompt in draw_prompts(llm, others, 16, seed=turn):
        llm.add_request(prompt, answer)
    for _ in range(4):
        llm.step()
    llm.scheduler.prefill_chunk = chunk
    (prompt,) = draw_prompts(llm, 1, long, seed=100 + turn)
    llm.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    steps_ms = []
    while llm.scheduler.waiting or llm.scheduler.prefilling:
        steps_ms.append(1e3 * seconds_of(llm.step))
    run_all_s(llm)
    return steps_ms

"""What does a shared prefix save of the TTFT?"""

from __future__ import annotations

from typing import Any

from rooflab.bench.latency.calibrate import calibrated
from rooflab.bench.latency.ledger import seconds_of
from rooflab.bench.latency.step_model import StepWork
from rooflab.bench.latency.study import Lab, Study, at_least, spread
from rooflab.engine.llm import LLM, SamplingParams


def run(lab: Lab) -> Study:
    """Measures the TTFT of prompts that share a prefix which the cache holds, and of prompts that share nothing.

    The prediction is the step time of the tokens behind the prefix, which attend to it.
    """
    suffix = 16
    prefixes = (16, 32) if lab.quick else (64, 128, 256, 448)
    llm = lab.llm(max_model_len=prefixes[-1] + 64, max_num_seqs=4, num_kv_blocks=2048)
    model = calibrated(llm, lab.size(480, 24))
    rows: list[dict[str, Any]] = []
    for length in prefixes:
        prompts = lab.prompts(llm, lab.size(8, 2) + 1, length + suffix, seed=length)
        shared, samples = prompts[0][:length], dict[str, list[float]](cold=[], warm=[])
        for prompt in prompts:
            for kind, ids in (("cold", prompt), ("warm", shared + prompt[length:])):
                samples[kind].append(_ttft_ms(llm, ids))
        # The first prompt puts the prefix into the cache.
        cold, warm = (spread(times[1:]) for times in samples.values())
        predicted_cold, predicted_warm = (
            1e3 * model.seconds(StepWork(0, 0, ((start, length + suffix),), 1)) for start in (0, length)
        )
        row = {"prefix": length, "cold_ms": cold[0], "warm_ms": warm[0], "low_ms": warm[1], "high_ms": warm[2]}
        rows.append(row | {"predicted_cold_ms": predicted_cold, "predicted_warm_ms": predicted_warm})
    last = rows[-1]
    saved, predicted = (1 - last[f"{name}warm_ms"] / last[f"{name}cold_ms"] for name in ("", "predicted_"))
    computed = suffix / (prefixes[-1] + suffix)
    return Study(
        claim="A cached prefix makes the TTFT that of the rest of the prompt",
        source="SGLang (Zheng et al., arXiv 2312.07104)",
        rows=rows,
        verdict=at_least(saved / (1 - computed), 0.85, 0.5),
        number=f"with {prefixes[-1]} of {prefixes[-1] + suffix} tokens cached the TTFT falls by {saved:.0%} "
        f"({predicted:.0%} predicted; {1 - computed:.0%} of the tokens are not computed)",
        about=f"{lab.about(llm)}, {suffix} tokens behind the prefix",
        x="prefix",
        curves={
            "prefix cached": "warm_ms",
            "prefix cached, predicted": "predicted_warm_ms",
            "nothing cached": "cold_ms",
            "nothing cached, predicted": "predicted_cold_ms",
        },
        x_label="tokens of the prefix",
        y_label="TTFT (ms)",
        band=("low_ms", "high_ms"),
    )


def _ttft_ms(llm: LLM, prompt: list[int]) -> float:
    llm.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    seconds = 0.0
    while llm.has_work:
        seconds += seconds_of(llm.step)
    return 1e3 * seconds

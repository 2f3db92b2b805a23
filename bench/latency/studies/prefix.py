"""What does a shared prefix save of the TTFT?"""

from __future__ import annotations

from typing import Any

from rooflab.bench.latency.calibrate import calibrated
from rooflab.bench.latency.ledger import seconds_of
from rooflab.bench.latency.step_model import StepModel, StepWork
from rooflab.bench.latency.study import Lab, Study, at_least, curves, spread
from rooflab.engine.llm import SamplingParams


def run(lab: Lab) -> Study:
    """TTFT of prompts that share a prefix which the cache holds, and of prompts that share nothing.

    Predicted: the step time of the tokens behind the prefix, which attend to it.
    """
    suffix = 16
    prefixes = (16, 32) if lab.quick else (64, 128, 256, 448)
    llm = lab.llm(max_model_len=prefixes[-1] + 64, max_num_seqs=4, num_kv_blocks=2048)
    model = calibrated(llm, lab.size(480, 24))
    rows: list[dict[str, Any]] = []
    for length in prefixes:
        prompts = lab.prompts(llm, lab.size(8, 2) + 1, length + suffix, seed=length)
        shared, samples = prompts[0][:length], dict[str, list[float]]()
        for number, prompt in enumerate(prompts):
            for kind, ids in (("cold", prompt), ("warm", shared + prompt[length:])):
                took = _ttft(llm, ids)
                if number:  # the first puts the prefix into the cache
                    samples.setdefault(kind, []).append(1e3 * took)
        cold, warm = (spread(samples[kind]) for kind in ("cold", "warm"))
        works = [StepWork(0, 0, ((start, length + suffix),), 1) for start in (0, length)]
        far = [StepWork(0, 0, ((start, 8 * (length + suffix)),), 1) for start in (0, 8 * length)]
        rows.append({
            "prefix": length, "cold_ms": cold[0], "warm_ms": warm[0], "low_ms": warm[1], "high_ms": warm[2],
            **_ms("predicted", model, works), **_ms("h100", lab.h100, far),
        })  # fmt: skip
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
        curves=(
            *curves(rows, "prefix", {
                "nothing cached": "cold_ms", "nothing cached, predicted": "predicted_cold_ms",
                "prefix cached": "warm_ms", "prefix cached, predicted": "predicted_warm_ms",
            }, band="prefix cached"),
            *curves(rows, "prefix", {"nothing cached": "h100_cold_ms", "prefix cached": "h100_warm_ms"}, 8),
        ),
        x="tokens of the prefix", y="TTFT (ms)", about=f"{lab.about(llm)}, {suffix} tokens behind the prefix",
    )  # fmt: skip


def _ms(name: str, model: StepModel, works: list[StepWork]) -> dict[str, float]:
    return {f"{name}_{kind}_ms": 1e3 * model.seconds(work) for kind, work in zip(("cold", "warm"), works, strict=True)}


def _ttft(llm: Any, prompt: list[int]) -> float:
    llm.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    took = 0.0
    while llm.has_work:
        took += seconds_of(llm.step)
    return took

"""Measures how the number of bits per weight changes the bytes of the weights, the ITL and the error of the logits."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.bench.latency.ledger import draw_prompts, seconds_of, stepping
from rooflab.bench.latency.study import Lab, Study, at_least, at_most, spread, worst
from rooflab.engine.llm import LLM, SamplingParams

BITS_BY_DTYPE = {"float32": 32, "bfloat16": 16, "int8": 8.5}


def run(lab: Lab) -> Study:
    """Measures the ITL of one sequence for each weight dtype, and compares logits and greedy text with fp32.

    A decode step reads all weights, so the predicted speed-up is the ratio of the bits per weight.  The logits' error
    must be at most 1% for "holds", and 10% for "holds in part".  int8 runs only on CPUs."""
    rows: list[dict[str, Any]] = []
    steps, fp32_logits, texts = lab.size(12, 3), None, list[list[int]]()
    for dtype, bits in BITS_BY_DTYPE.items():
        llm = lab.llm(dtype=dtype, max_model_len=256, max_num_seqs=4, num_kv_blocks=128)
        with stepping(llm, "decode", 1, 64, steps) as decode_step:
            itl_ms, low_itl_ms, high_itl_ms = spread([1e3 * seconds_of(decode_step) for _ in range(steps)])
        logits = _logits(llm)
        fp32_logits = logits if fp32_logits is None else fp32_logits
        params = SamplingParams(max_tokens=lab.size(24, 4), ignore_eos=True)
        text = [answer.outputs[0].token_ids for answer in llm.generate(draw_prompts(llm, 4, 16, seed=0), params)]
        texts = texts or text
        is_same_token = [a == b for fp32, ids in zip(texts, text, strict=True) for a, b in zip(fp32, ids, strict=True)]
        logits_error = float((logits - fp32_logits).norm() / fp32_logits.norm())
        row = {
            "weights": dtype,
            "bits": bits,
            "itl_ms": itl_ms,
            "low_ms": low_itl_ms,
            "high_ms": high_itl_ms,
            "error": logits_error,
        }
        rows.append(row | {"same_tokens": sum(is_same_token) / len(is_same_token)})
        if llm.device.type == "cuda" and bits == 16:
            break
    fp32, last = rows[0], rows[-1]
    for row in rows:
        row |= {"gain": fp32["itl_ms"] / row["itl_ms"], "predicted": fp32["bits"] / row["bits"]}
        row["predicted_ms"] = fp32["itl_ms"] / row["predicted"]
    return Study(
        claim="Half the bits a weight halve the ITL, at little error",
        source="weight-only quantisation such as Frantar et al., arXiv 2210.17323",
        rows=rows,
        verdict=worst(at_least(last["gain"] / last["predicted"], 0.8, 0.4), at_most(last["error"], 0.01, 0.1)),
        number=f"{last['weights']} weights take {last['gain']:.2f} times less time than {fp32['weights']}, "
        f"{last['predicted']:g} by their bytes; logits differ by {last['error']:.1%}, {last['same_tokens']:.0%} of "
        "greedy tokens are the same",
        about=f"{llm.arch.name} on {llm.device.type}, one sequence of 64 tokens; activations are bf16 with int8",
        x="bits",
        curves={"ITL": "itl_ms", "ITL, predicted": "predicted_ms"},
        x_label="bits a weight",
        y_label="ms",
        band=("low_ms", "high_ms"),
    )


def _logits(llm: LLM) -> torch.Tensor:
    """Returns the fp32 logits after the last token of a random prompt."""
    (prompt,), captured_logits, compute_logits = (
        draw_prompts(llm, 1, 32, seed=0),
        list[torch.Tensor](),
        llm.runner.logits,
    )

    def logits(step: Any) -> torch.Tensor:
        step_result = compute_logits(step)
        captured_logits.append(step_result.float().clone())
        return step_result

    llm.runner.logits = logits  # type: ignore[method-assign]
    llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    llm.runner.logits = compute_logits  # type: ignore[method-assign]
    return captured_logits[0]

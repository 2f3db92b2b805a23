"""What do fewer bits a weight give in bytes, ITL and error?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rooflab.bench.latency.ledger import seconds_of, stepping
from rooflab.bench.latency.step_model import Work
from rooflab.bench.latency.study import Curve, Lab, Study, judged, spread
from rooflab.engine.llm import LLM, SamplingParams

BITS = {"float32": 32, "bfloat16": 16, "int8": 8}


def run(lab: Lab) -> Study:
    """ITL of one sequence by the dtype of the weights, and how far the logits and the greedy text are from fp32's.

    Predicted: the ratio of the weights' bytes, since a decode step reads them all.
    """
    rows: list[dict[str, Any]] = []
    few, exact, texts = lab.size(12, 3), None, dict[str, list[list[int]]]()
    dtypes = BITS if lab.llm(max_model_len=64, num_kv_blocks=8).device.type == "cpu" else {"bfloat16": 16}
    for dtype, bits in dtypes.items():
        llm = lab.llm(dtype=dtype, max_model_len=256, max_num_seqs=4, num_kv_blocks=128)
        with stepping(llm, "decode", 1, 64, few) as step:
            took = spread([1e3 * seconds_of(step) for _ in range(few)])
        logits = _logits(llm, lab)
        exact = logits if exact is None else exact
        params = SamplingParams(max_tokens=lab.size(24, 4), ignore_eos=True)
        texts[dtype] = [out.outputs[0].token_ids for out in llm.generate(lab.prompts(llm, 4, 16), params)]
        same = [a == b for one, other in zip(*(texts[key] for key in ("float32", dtype)), strict=True)
                for a, b in zip(one, other, strict=True)]  # fmt: skip
        rows.append({
            "weights": dtype, "bits": bits, "itl_ms": took[0], "low_ms": took[1], "high_ms": took[2],
            "error": float((logits - exact).norm() / exact.norm()), "same_tokens": sum(same) / len(same),
        })  # fmt: skip
    for row in rows:
        row |= {"gain": rows[0]["itl_ms"] / row["itl_ms"], "predicted": rows[0]["bits"] / row["bits"]}
    far = replace(lab.h100, weight_dtype="fp8_e4m3")
    h100 = [1e3 * of.seconds(Work(1, 2048, (), 1)) for of in (lab.h100, far)]
    last, widths = rows[-1], [row["bits"] for row in rows]
    return Study(
        name="quantisation",
        claim="Half the bits a weight halve the ITL, at little error",
        source="weight-only quantisation such as Frantar et al., arXiv 2210.17323",
        rows=rows,
        verdict=judged(last["gain"] / last["predicted"], 0.8, 0.4),
        number=f"{last['weights']} weights take {last['gain']:.2f} times less time than fp32, {last['predicted']:g} by "
        f"their bytes; logits differ by {last['error']:.1%}, {last['same_tokens']:.0%} of greedy tokens are the same; "
        f"on an H100 fp8 takes {h100[0] / h100[1]:.2f} times less than bf16, 2 by its bytes",
        curves=(
            Curve("ITL", widths, [row["itl_ms"] for row in rows], low=[row["low_ms"] for row in rows],
                  high=[row["high_ms"] for row in rows]),
            Curve("ITL, predicted", widths, [rows[0]["itl_ms"] / row["predicted"] for row in rows], dashed=True),
            Curve("ITL", (16, 8), h100, 1),
            Curve("ITL, predicted", (16, 8), (h100[0], h100[0] / 2), 1, dashed=True),
        ),
        x="bits a weight", y="ms", about=f"{lab.model}, one sequence of 64 tokens; activations are bf16 with int8",
    )  # fmt: skip


def _logits(llm: LLM, lab: Lab) -> torch.Tensor:
    """Of the last token of one prompt, in fp32."""
    (prompt,), seen, plain = lab.prompts(llm, 1, 32), list[torch.Tensor](), llm.runner.logits

    def logits(step: Any) -> torch.Tensor:
        found = plain(step)
        seen.append(found.float().clone())
        return found

    llm.runner.logits = logits  # type: ignore[method-assign]
    llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    llm.runner.logits = plain  # type: ignore[method-assign]
    return seen[0]

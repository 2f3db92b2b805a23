"""What do fewer bits a weight give in bytes, ITL and error?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rooflab.bench.latency.ledger import seconds_of, stepping
from rooflab.bench.latency.step_model import StepWork
from rooflab.bench.latency.study import Curve, Lab, Study, at_least, at_most, spread, worst
from rooflab.engine.llm import LLM, SamplingParams

BITS = {"float32": 32, "bfloat16": 16, "int8": 8}


def run(lab: Lab) -> Study:
    """ITL of one sequence by the dtype of the weights, and how far the logits and the greedy text are from those of
    the first, fp32; a GPU has no int8 here.

    Predicted: the ratio of the weights' bytes, since a decode step reads them all.  The error is little if the logits
    are within 1%, and in part if they are within 10%.
    """
    rows: list[dict[str, Any]] = []
    few, exact, texts = lab.size(12, 3), None, dict[str, list[list[int]]]()
    for dtype, bits in BITS.items():
        llm = lab.llm(dtype=dtype, max_model_len=256, max_num_seqs=4, num_kv_blocks=128)
        with stepping(llm, "decode", 1, 64, few) as step:
            took = spread([1e3 * seconds_of(step) for _ in range(few)])
        logits = _logits(llm, lab)
        exact = logits if exact is None else exact
        params = SamplingParams(max_tokens=lab.size(24, 4), ignore_eos=True)
        texts[dtype] = [out.outputs[0].token_ids for out in llm.generate(lab.prompts(llm, 4, 16), params)]
        same = [a == b for one, other in zip(next(iter(texts.values())), texts[dtype], strict=True)
                for a, b in zip(one, other, strict=True)]  # fmt: skip
        rows.append({
            "weights": dtype, "bits": bits, "itl_ms": took[0], "low_ms": took[1], "high_ms": took[2],
            "error": float((logits - exact).norm() / exact.norm()), "same_tokens": sum(same) / len(same),
        })  # fmt: skip
        if llm.device.type == "cuda" and bits == 16:
            break
    for row in rows:
        row |= {"gain": rows[0]["itl_ms"] / row["itl_ms"], "predicted": rows[0]["bits"] / row["bits"]}
    far = replace(lab.h100, weight_dtype="fp8_e4m3")
    h100 = [1e3 * of.seconds(StepWork(1, 2048, (), 1)) for of in (lab.h100, far)]
    first, last, widths = rows[0], rows[-1], [row["bits"] for row in rows]
    return Study(
        claim="Half the bits a weight halve the ITL, at little error",
        source="weight-only quantisation such as Frantar et al., arXiv 2210.17323",
        rows=rows,
        verdict=worst(at_least(last["gain"] / last["predicted"], 0.8, 0.4), at_most(last["error"], 0.01, 0.1)),
        number=f"{last['weights']} weights take {last['gain']:.2f} times less time than {first['weights']}, "
        f"{last['predicted']:g} by their bytes; logits differ by {last['error']:.1%}, {last['same_tokens']:.0%} of "
        f"greedy tokens are the same; by arithmetic fp8 takes {h100[0] / h100[1]:.2f} times less than bf16 on an H100",
        curves=(
            Curve("ITL", widths, [row["itl_ms"] for row in rows], low=[row["low_ms"] for row in rows],
                  high=[row["high_ms"] for row in rows]),
            Curve("ITL, predicted", widths, [first["itl_ms"] / row["predicted"] for row in rows]),
            Curve("ITL", (16, 8), h100, 1),
            Curve("ITL, predicted", (16, 8), (h100[0], h100[0] / 2), 1),
        ),
        x="bits a weight", y="ms",
        about=f"{llm.arch.name} on {llm.device.type}, one sequence of 64 tokens; activations are bf16 with int8",
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

"""Does an answer depend on who else is in the batch, and which kernel is the first to differ?"""

from __future__ import annotations

import math
from typing import Any

import torch

from rooflab.bench.latency.engine_calls import watched_ops
from rooflab.bench.latency.study import Curve, Lab, Study
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.kernels.tuning import bucket_of


def run(lab: Lab) -> Study:
    """One sequence's next step alone and in growing batches: the first op whose output differs, in ulps of its dtype,
    and how many greedy tokens are others in the end.  Alone it runs twice, so that what differs from run to run is not
    blamed on the batch.

    Predicted: a row's result stays the same as long as every op takes its kernel and its order of summation from the
    row alone; so it changes where the bucket of the batch has another kernel.
    """
    rows: list[dict[str, Any]] = []
    batches = (1, 3) if lab.quick else (1, 2, 8, 32)
    llm = lab.llm(max_num_seqs=batches[-1], max_model_len=128, num_kv_blocks=8 * batches[-1], prefix_caching=False)
    prompts = lab.prompts(llm, batches[-1], 24)
    params = SamplingParams(max_tokens=lab.size(32, 6), ignore_eos=True)
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts[: lab.size(8, 2)]]
    first = _outputs(llm, prompts[:1])
    for batch in batches:
        outputs = _outputs(llm, prompts[:batch])
        differ = [(name, _ulps(one, other)) for (name, one), (_, other) in zip(first, outputs, strict=True)]
        found = next(((name, ulps) for name, ulps in differ if ulps), ("none", 0))
        together = [out.outputs[0].token_ids for out in llm.generate(prompts[:batch], params)]
        pairs = [(a, b) for one, two in zip(alone, together, strict=False) for a, b in zip(one, two, strict=True)]
        serving = ("gemm", bucket_of(batch))
        kernels = {choice.kernel.name for choice in llm.ops.choices if (choice.op, choice.bucket) == serving}
        rows.append({
            "batch": batch, "first": found[0], "ulps": found[1], "last_ulps": differ[-1][1],
            "flipped": sum(a != b for a, b in pairs) / len(pairs), "gemm": "+".join(sorted(kernels)),
        })  # fmt: skip
    others = [row for row in rows[1:] if row["last_ulps"] > rows[0]["last_ulps"] or row["ulps"] > rows[0]["ulps"]]
    flips = max(row["flipped"] for row in rows) - rows[0]["flipped"]
    return Study(
        claim="The same prompt gives the same tokens whatever else is in the batch",
        source="users of temperature 0; against it He et al., Defeating nondeterminism in LLM inference, 2025",
        rows=rows,
        verdict="holds" if not others else "holds in part" if not flips else "fails",
        number=in_words(rows[0], others, batches[-1], flips),
        curves=(
            Curve("largest difference of the logits", batches, [max(row["last_ulps"], 0.5) for row in rows]),
            Curve("first difference", batches, [max(row["ulps"], 0.5) for row in rows]),
        ),
        x="sequences",
        y="ulps (0.5: none)",
        log=True,
        about=f"{lab.about(llm)}, prompts of 24 tokens, greedy",
    )


def in_words(alone: dict[str, Any], others: list[dict[str, Any]], most: int, flips: float) -> str:
    """What the rows show, as one sentence: of the step alone, and of the batches whose result is another."""
    if not others:
        again = f", but {alone['first']} differs from run to run ({alone['ulps']} ulps)" if alone["ulps"] else ""
        return f"no op differs by the batch, of up to {most}{again}"
    first, last = others[0], max(row["last_ulps"] for row in others)
    greedy = f"up to {flips:.1%} of greedy tokens are others" if flips > 0 else "all greedy tokens are the same"
    return (
        f"{first['first']} is the first to differ, from a batch of {first['batch']} on ({first['ulps']} ulps; {last} "
        f"in the logits); {greedy}"
    )


def _outputs(llm: LLM, prompts: list[list[int]]) -> list[tuple[str, torch.Tensor]]:
    """The first sequence's row of every op's output in its second step, in order, and its logits."""
    seen: list[tuple[str, torch.Tensor]] = []

    def noted(op: str, _: Any, __: Any, result: Any) -> None:
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                seen.append((op, value[0].clone()))

    for prompt in prompts:
        llm.add_request(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    while llm.scheduler.waiting or llm.scheduler.prefilling:
        llm.step()
    with watched_ops(llm.runner, noted):
        llm.step()
    while llm.has_work:
        llm.step()
    return seen


def _ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    """The largest difference, in units of the last place of the largest value, rounded up."""
    largest = float(one.abs().max())
    unit = torch.finfo(one.dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 1.0
    return math.ceil(float((one.double() - other.double()).abs().max()) / unit)

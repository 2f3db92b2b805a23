"""When is a decode step bound by launches and the host, and not by its kernels?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooflab.bench.latency.ledger import measured
from rooflab.bench.latency.study import Curve, Lab, Study, judged
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.steps import decode_cost

LAUNCH_US = 3.5
"""Of one kernel without a graph: the floor that QuACK's notes give for an H100.  A launch from Python costs more."""


def run(lab: Lab) -> Study:
    """The share of a decode step that is not in its kernels, by batch; and on an H100 the step by model and batch, with
    a launch for each kernel and without (a CUDA graph).

    Predicted: the host's time of the smallest step, over each step.
    """
    rows: list[dict[str, Any]] = []
    batches = (1, 2) if lab.quick else (1, 4, 16)
    for batch in batches:
        llm = lab.llm(max_num_seqs=batch, max_model_len=128, num_kv_blocks=16 * batch, prefix_caching=False)
        found = measured(llm, "decode", batch, 32, steps=lab.size(12, 2))
        rows.append({"batch": batch, "step_ms": found.step_ms, "host_ms": found.host_ms,
                     "host_share": found.host_ms / found.step_ms})  # fmt: skip
    for row in rows:
        row["predicted"] = rows[0]["host_ms"] / row["step_ms"]
    sizes, models = (1, 8, 64, 256), ("smollm2-135m", "llama-3.1-8b")
    gains = {model: [_gain(lab, model, batch) for batch in sizes] for model in models}
    share = rows[0]["host_share"]
    small, large = (gains[model][0] for model in models)
    return Study(
        name="launch-bound",
        claim="Small models at small batches are bound by launches, and CUDA graphs take that away",
        source="vLLM's and FlashInfer's documentation of CUDA graphs",
        rows=rows + [{"model": model, **{f"batch_{n}": g for n, g in zip(sizes, own, strict=True)}}
                     for model, own in gains.items()],
        verdict=judged(small, 2.0, 1.2) if large < 1.2 else "holds in part",
        number=f"on an H100, with {LAUNCH_US:g} us a launch, a step of one sequence takes {small:.1f} times its "
        f"kernels' time for {models[0]} and {large:.2f} for {models[1]}; here, with no launches, the host has "
        f"{share:.0%} of a step",
        curves=(
            Curve("host's share", batches, [row["host_share"] for row in rows]),
            Curve("host's share, predicted", batches, [row["predicted"] for row in rows], dashed=True),
            *(Curve(f"{model}: with launches over kernels alone", sizes, own, 1) for model, own in gains.items()),
        ),
        x="sequences", y="share; on the H100, times its kernels", about=f"{lab.model}, contexts of 32; H100: of 1,024",
    )  # fmt: skip


def _gain(lab: Lab, name: str, batch: int) -> float:
    """The time of a step whose launches come one by one, over that of its kernels: the host is never ahead."""
    model = replace(lab.h100, arch=get_architecture(name))
    kernels_ms = sum(one.ms for one in model.decode(batch, 1024))
    launches = sum(cost.calls for cost in decode_cost(model.arch, batch, 1024))
    return max(kernels_ms, 1e-3 * LAUNCH_US * launches) / kernels_ms

"""When is a decode step bound by launches and the host, and not by its kernels?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rooflab.bench.latency.ledger import measured, seconds_of, stepping
from rooflab.bench.latency.study import Curve, Lab, Study, at_least, at_most, curves, spread, worst
from rooflab.engine.choose.op_times import wrapped_ops
from rooflab.engine.llm import LLM
from rooflab.roofline.architecture import Architecture, get_architecture
from rooflab.roofline.steps import step_ops

LAUNCH_US = 3.5
"""Of one kernel without a graph: the floor that QuACK's notes give for an H100.  A launch from Python costs more."""
MODELS = ("smollm2-135m", "llama-3.1-8b")
LARGER_ON_CPU = "qwen3-0.6b"


def run(lab: Lab) -> Study:
    """How many times as long as its ops a decode step takes, by model and batch.

    On a GPU these are steps without graphs over steps with them; on a CPU, which has no graphs to test the claim with,
    steps over the sum of their ops, which is the most that less work between them could give.  Predicted: the first
    row's time beside the ops, for each call.  The claim is that the first row, of the smaller model and one sequence,
    waits, and that the last does not.
    """
    rows: list[dict[str, Any]] = []
    batches, few = ((1, 2) if lab.quick else (1, 4, 16)), lab.size(8, 2)
    options: dict[str, Any] = {"max_num_seqs": batches[-1], "max_model_len": 128, "num_kv_blocks": 16 * batches[-1],
                               "prefix_caching": False}  # fmt: skip
    llms = [lab.llm(**options)]
    on_cpu = llms[0].device.type == "cpu"
    if not lab.quick:
        other = LARGER_ON_CPU if on_cpu else MODELS[lab.model != MODELS[1]]
        llms.append(replace(lab, model=other, dummy=True).llm(**options))
    for llm in sorted(llms, key=lambda llm: llm.arch.parameters().total):
        for batch in batches:
            ops_ms, rest_ms = _times(llm, batch, few)
            calls = _launches(llm.arch, batch, 32)
            rest = rows[0]["rest_ms"] / rows[0]["calls"] * calls if rows else None
            rows.append({
                "model": llm.arch.name, "batch": batch, "calls": calls, "ops_ms": ops_ms, "rest_ms": rest_ms,
                "times": 1 + rest_ms / ops_ms, "predicted": None if rest is None else 1 + rest / ops_ms,
            })  # fmt: skip
    sizes = (1, 8, 64, 256)
    far = {model: [_on_h100(lab, model, batch) for batch in sizes] for model in MODELS}
    first, last = rows[0], rows[-1]
    judged = worst(at_least(first["times"], 2.0, 1.2), at_most(last["times"], 1.2, 2.0))
    needs = "needs CUDA graphs, which a CPU does not have; " if on_cpu else ""
    how = "as its ops" if on_cpu else "without graphs as with them"
    return Study(
        claim="Small models at small batches are bound by launches, and CUDA graphs take that away",
        source="vLLM's and FlashInfer's documentation of CUDA graphs",
        rows=rows + [{"by arithmetic": model, **{f"h100_batch_{n}": x for n, x in zip(sizes, own, strict=True)}}
                     for model, own in far.items()],
        verdict="not tested" if on_cpu else judged,
        number=f"{needs}{first['model']} with {first['batch']} sequence takes {first['times']:.2f} times, "
        f"{last['model']} with {last['batch']} {last['times']:.2f} times as long {how}; by arithmetic with "
        f"{LAUNCH_US:g} us a launch one sequence takes {far[MODELS[0]][0]:.1f} times with {MODELS[0]} and "
        f"{far[MODELS[1]][0]:.2f} with {MODELS[1]} on an H100",
        curves=(
            *(curve for name in dict.fromkeys(row["model"] for row in rows) for curve in _curves(name, rows)),
            *(Curve(model, sizes, own, 1) for model, own in far.items()),
        ),
        x="sequences", y="step over its ops", about=f"contexts of 32 on {llms[0].device.type}; H100: of 1,024",
    )  # fmt: skip


def _curves(name: str, rows: list[dict[str, Any]]) -> Iterator[Curve]:
    own = [row for row in rows if row["model"] == name]
    yield from curves(own, "batch", {name: "times"})
    yield from curves([row for row in own if row["predicted"]], "batch", {f"{name}, predicted": "predicted"})


def _times(llm: LLM, batch: int, few: int) -> tuple[float, float]:
    """Milliseconds of a step's ops, and of what there is beside them."""
    if llm.device.type == "cpu":
        found = measured(llm, "decode", batch, 32, steps=few)
        return found.ops_ms, max(0.0, found.host_ms)
    with_graphs, without = [], []
    with stepping(llm, "decode", batch, 32, 2 * few + 2) as step:
        for _ in range(few + 1):  # the first step of each kind warms up
            with_graphs.append(1e3 * seconds_of(step))
            with wrapped_ops(llm.runner, lambda op, function: function):
                without.append(1e3 * seconds_of(step))
    graph_ms, *_ = spread(with_graphs[1:])
    eager_ms, *_ = spread(without[1:])
    return graph_ms, max(0.0, eager_ms - graph_ms)


def _launches(arch: Architecture, batch: int, context: int) -> int:
    return sum(cost.calls for cost in step_ops(arch, "decode", batch, context))


def _on_h100(lab: Lab, name: str, batch: int) -> float:
    """The time of a step whose launches come one by one, over that of its kernels: the host is never ahead."""
    model = replace(lab.h100, arch=get_architecture(name))
    kernels_ms = sum(one.ms for one in model.ops("decode", batch, 1024))
    launches = _launches(model.arch, batch, 1024)
    return max(kernels_ms, 1e-3 * LAUNCH_US * launches) / kernels_ms

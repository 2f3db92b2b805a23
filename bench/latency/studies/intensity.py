"""Is decode bound by memory, and prefill by arithmetic?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rooflab.bench.core import ceilings_for
from rooflab.bench.latency.ledger import measured
from rooflab.bench.latency.study import Curve, Lab, Study, at_least, curves, worst
from rooflab.roofline.model import Ceilings
from rooflab.roofline.steps import Kind, step_ops


def run(lab: Lab) -> Study:
    """FLOP/s against FLOPs a byte of decode steps of growing batches and of prompts.

    Predicted: the roof of this machine at the step's intensity.  Of decode the claim is judged by what more sequences
    cost: nothing while a step waits for memory.  Of prefill by what more tokens cost: as much more time as arithmetic.
    """
    rows: list[dict[str, Any]] = []
    works: list[tuple[Kind, int, int]] = [("decode", 1, 64), ("decode", 2, 64), ("prefill", 1, 8), ("prefill", 1, 24)]
    if not lab.quick:
        works = [("decode", n, 128) for n in (1, 2, 4, 16)] + [("prefill", 1, n) for n in (64, 256)]
    few = lab.size(8, 2)
    llm = lab.llm(max_num_seqs=16, max_model_len=lab.size(512, 128), num_kv_blocks=512, prefix_caching=False)
    ceilings = ceilings_for(llm.device)
    assert ceilings is not None, "of the machine that ran"
    for kind, batch, context in works:
        found = measured(llm, kind, batch, context, steps=few, ceilings=ceilings)
        flops, moved = (sum(getattr(row, name) for row in found.rows) for name in ("flops", "least_bytes"))
        rows.append({
            "step": kind, "tokens": batch if kind == "decode" else context, "intensity": flops / moved,
            "gflop": flops / 1e9, "gflops": flops / found.step_ms / 1e6, "step_ms": found.step_ms,
            "predicted": min(ceilings.hbm_bytes_per_s * (flops / moved), _peak(ceilings, llm.dtype_name)) / 1e9,
        })  # fmt: skip
    decodes, prompts = ([row for row in rows if row["step"] == kind] for kind in ("decode", "prefill"))
    last = decodes[2] if len(decodes) > 2 else decodes[-1]
    free = decodes[0]["step_ms"] / last["step_ms"]
    more, longer = (prompts[-1][name] / prompts[0][name] for name in ("gflop", "step_ms"))
    h100 = lab.h100.device.ceilings()
    ridge = _peak(ceilings, llm.dtype_name) / ceilings.hbm_bytes_per_s
    return Study(
        claim="Decode is bound by memory bandwidth, and prefill by arithmetic",
        source="Pope et al., arXiv 2211.05102, and every essay since",
        rows=rows,
        verdict=worst(at_least(free, 0.8, 0.4), at_least(longer / more, 0.8, 0.4)),
        number=f"a step of {last['tokens']} sequences takes {1 / free:.2f} times one of one; a prompt of "
        f"{prompts[-1]['tokens']} tokens takes {longer:.2f} times one of {prompts[0]['tokens']}, with {more:.2f} times "
        f"the arithmetic; the ridge is at {ridge:.0f} FLOP a byte here, decode lies at {decodes[0]['intensity']:.2f} "
        f"to {decodes[-1]['intensity']:.1f}, the longest prompt at {rows[-1]['intensity']:.0f}; on an H100 the ridge "
        f"is at {_peak(h100, 'bfloat16') / h100.hbm_bytes_per_s:.0f}",
        curves=(
            *curves(decodes, "intensity", {"decode": "gflops"}),
            *curves(prompts, "intensity", {"prefill": "gflops"}),
            *curves(rows, "intensity", {"roof, predicted": "predicted"}),
            *(curve for kind in ("decode", "prefill") for curve in _on_h100(lab, kind)),
        ),
        x="FLOP a byte",
        y="GFLOP/s",
        log=True,
        about=f"{lab.about(llm)}; contexts of {works[0][2]}",
    )


def _peak(ceilings: Ceilings, dtype: str) -> float:
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "bf16"}
    return ceilings.tensor_flops_per_s[names[dtype]]


def _on_h100(lab: Lab, kind: Kind) -> Iterator[Curve]:
    rows = []
    for n in (1, 8, 64, 256) if kind == "decode" else (128, 512, 4096):
        batch, context = (n, 1024) if kind == "decode" else (1, n)
        costs = step_ops(lab.h100.arch, kind, batch, context)
        flops, moved = sum(x.calls * x.cost.flops for x in costs), sum(x.calls * x.cost.bytes for x in costs)
        ms = sum(op.ms for op in lab.h100.ops(kind, batch, context))
        rows.append({"intensity": flops / moved, "gflops": flops / ms / 1e6})
    return curves(rows, "intensity", {kind: "gflops"}, 1)

"""Predicted times of the matrix products, kept as records beside a table: what a card is expected to say, written down
before one is asked.

    python -m rooflab.bench.predict.predictions --out results/predictions

Every optimized kernel of the six ops is compiled for sm_90a on a handful of the suite's shapes, and predicted on an
H100 and an H200 (`bench/predict/`).  A record is of kind `static` and basis `predicted`: its time is `predicted_ms`,
never a latency, and its metrics are the parts that sum to it.  The GPU stands with the code (`compiled`) and not in the
record's ceilings, which are those of a machine that was there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from rooflab.bench.predict import model
from rooflab.bench.predict.cases import COMPILED_BACKENDS, Target
from rooflab.bench.predict.explain import Explanation, explain
from rooflab.bench.predict.targets import choose_cases, choose_scheme
from rooflab.bench.records.environment import Environment, snapshot
from rooflab.bench.records.files import RunWriter
from rooflab.bench.records.record import Record, new_run_id
from rooflab.kernels import registry
from rooflab.kernels.configs import config_for
from rooflab.roofline.device import get_device

CASES: Mapping[str, Sequence[str]] = {
    "gemm": (
        *(f"M={M},N={M},K={K},layout=NT,bias=false" for M, K in ((4096, 4096), (8192, 512), (8192, 8192))),
        *(f"M={M},N=28672,K=4096,layout=NT,bias=false" for M in (1, 16, 64, 2048)),
        "M=16,N=4096,K=4096,layout=NT,bias=false",
    ),
    "gemm_fp8": (
        "M=4096,N=4096,K=4096,scales=tensor,bias=false",
        "M=8192,N=8192,K=8192,scales=tensor,bias=false",
        "M=2048,N=28672,K=4096,scales=tensor,bias=false",
        "M=2048,N=28672,K=4096,scales=block,bias=false",
        "M=2048,N=28672,K=4096,scales=tensor,bias=false,fast_accum=true",
    ),
    "gemm_w8a16": tuple(f"M={M},N=8192,K=8192,bias=false" for M in (1, 16, 64)),
    "gemm_w4a16": tuple(f"M={M},N=8192,K=8192,zeros=false,bias=false" for M in (1, 16, 64)),
    "gemm_silu_and_mul": tuple(f"M={M},I=14336,K=4096,layout=NT" for M in (16, 64, 2048, 8192)),
    "gemm_grouped": (
        "T=128,top_k=2,E=8,N=28672,K=4096,skew=0.0",
        "T=4096,top_k=2,E=8,N=28672,K=4096,skew=0.0",
        "T=16384,top_k=8,E=128,N=1536,K=2048,skew=1.0",
    ),
}
GPUS = ("h100-sxm", "h200")
CAUTION = "Predictions, uncalibrated: computed from compiled code and data sheets; no kernel was timed."
_COLUMNS = ("case", "kernel", "predicted us", "bound us", "bound / predicted", "bound by", "its own largest part")
_EVERY_KERNEL_S = (model.LEAST, model.SUSTAINED)
"""Parts that no kernel can change."""


def targets(cases: Mapping[str, Sequence[str]] = CASES) -> list[Target]:
    """Every optimized kernel of each op with code of its own, on those of the op's cases that it takes on Hopper."""
    found = []
    for op, texts in cases.items():
        spec, scheme = registry.get_op(op), choose_scheme(registry.get_op(op), None)
        for case in choose_cases(spec, texts, scheme):
            inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
            found += [
                Target(op, kernel.name, case, scheme)
                for kernel in registry.kernels(op).values()
                if kernel.role == "optimized" and kernel.backend in COMPILED_BACKENDS
                if kernel.why_not_args(inputs) is None
            ]
    return found


def record(explained: Explanation, run_id: str, environment: Environment) -> Record:
    """One prediction.  Its `bound_fraction` is empty, for that is a measured time's."""
    target = explained.target
    kernel = registry.get_kernel(target.op, target.kernel)
    metrics = {f"predicted_{part.name.replace(' ', '_')}_ms": part.ms for part in explained.parts}
    if explained.bound_ms and explained.predicted_ms:
        metrics["predicted_bound_fraction"] = explained.bound_ms / explained.predicted_ms
    config = config_for(kernel, target.case, target.scheme, torch.device("meta")) if kernel.takes_config else None
    return Record(
        kind="static",
        run_id=run_id,
        status="COMPILE_ERROR" if explained.reason else "OK",
        reason=explained.reason or f"{CAUTION} {explained.sentence()}",
        environment=environment.to_dict(),
        commit=environment.commit,
        dirty=environment.dirty,
        op=target.op,
        kernel=target.kernel,
        role=kernel.role,
        backend=kernel.backend,
        case_id=target.case.id,
        case=dict(target.case),
        scheme=target.scheme.name,
        config=None if config is None else asdict(config),
        basis="bound" if explained.reason else "predicted",
        flops=explained.flops,
        least_bytes=explained.least_bytes,
        traffic_bytes=explained.bytes,
        traffic_basis="modelled" if explained.traffic_basis == "modelled" else None,
        intensity=explained.intensity,
        bound_ms=explained.bound_ms,
        limiter=explained.limiter,
        predicted_ms=explained.predicted_ms,
        prediction_error=explained.prediction_error,
        compiled=tuple({"target": f"sm_90a on {explained.gpu}", **launched} for launched in explained.compiled),
        metrics=metrics,
    )


def table(found: Iterable[Explanation], run_id: str, environment: Environment) -> str:
    """The predictions in Markdown, a table for each GPU and op."""
    changed = " with uncommitted changes" if environment.dirty else ""
    where = f"commit {(environment.commit or 'unknown')[:12]}{changed}"
    lines = ["# Predictions of the matrix products", "", f"**{CAUTION}**", ""]
    lines += [
        f"Made by `python -m rooflab.bench.predict.predictions` at {where}; records in `{run_id}.jsonl`. The last",
        "column leaves out the least work and the rates that cards sustain, which no kernel can change.",
        "",
    ]
    groups: dict[tuple[str, str, str], list[Explanation]] = {}
    for entry in found:
        groups.setdefault((entry.gpu, entry.target.op, entry.target.scheme.name), []).append(entry)
    for (gpu, op, scheme), own in groups.items():
        lines += [f"## Predictions: {op}, {scheme}, {gpu}", "", _row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
        lines += [_row(_cells(entry)) for entry in own] + [""]
    return "\n".join(lines)


def _cells(entry: Explanation) -> list[str]:
    if entry.predicted_ms is None or entry.bound_ms is None:
        return [entry.target.case.id, entry.target.kernel, *[""] * 4, entry.reason]
    largest = max((part for part in entry.parts if part.name not in _EVERY_KERNEL_S), key=lambda part: part.ms)
    times = [f"{ms * 1e3:,.1f}" for ms in (entry.predicted_ms, entry.bound_ms)]
    return [
        entry.target.case.id,
        entry.target.kernel,
        *times,
        f"{entry.bound_ms / entry.predicted_ms:.0%}",
        str(entry.limiter),
        f"{largest.name}, {largest.ms * 1e3:,.1f} us: {largest.why}",
    ]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Predicted times of the matrix products; no kernel is timed.")
    parser.add_argument("--out", type=Path, required=True, help="The folder of the records and of predictions.md.")
    parser.add_argument("--op", action="append", choices=tuple(CASES), help="One op; all without.")
    chosen = parser.parse_args(arguments)
    wanted = targets({op: CASES[op] for op in chosen.op or CASES})
    found = [entry for gpu in GPUS for entry in explain(wanted, get_device(gpu))]
    environment, writer = snapshot(), RunWriter(chosen.out, f"predictions-{new_run_id()}")
    writer.write(*(record(entry, writer.run_id, environment) for entry in found))
    (chosen.out / "predictions.md").write_text(table(found, writer.run_id, environment))
    print(f"{len(found)} predictions: {writer.path} and predictions.md beside it. {CAUTION}")


if __name__ == "__main__":
    main()

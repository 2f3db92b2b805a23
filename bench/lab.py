"""The main job: runs everything that the lab does once on this machine, and writes a summary."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rooflab.bench import show
from rooflab.bench.calls.selection import Selection, default_scheme, pick_device
from rooflab.bench.check.spread import Asked
from rooflab.bench.commands import count_benches, listed_checks, run_benches, run_checks, summarize_checks
from rooflab.bench.measure.engine_run import (
    PROMPT_SET,
    as_prompt,
    engine_record,
    kernel_names,
    run_batch,
    stream_one,
    warm_up,
)
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import RunWriter, result_folder
from rooflab.bench.records.plain import plain
from rooflab.bench.records.record import NOT_RUN, Record
from rooflab.bench.report.figures import bench_row, draw_records, largest_cases
from rooflab.bench.report.findings import findings
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.metrics import LatencySummary
from rooflab.engine.model_files import fetch
from rooflab.engine.ops import OpSet
from rooflab.kernels import registry
from rooflab.kernels.choices import launch_bucket, rows_of
from rooflab.kernels.registry import interpreting
from rooflab.reference.spec import Case

BENCH_S = 0.15
"""Seconds for each kernel and case; with this budget and the checks the lab takes minutes on two cores."""
LEFT_OUT = (
    "checked in {scheme}, with planted inputs for Triton kernels only on the smoke cases; `rooflab check` checks every "
    "dtype and draws more cases, and with --all it plants inputs on every case of the op"
)


def run_lab(out: Path | None = None, smoke: bool = False) -> dict[str, Any]:
    """Checks, times and draws every kernel, then answers real prompts; all results go to one folder.

    `smoke` takes fewer cases and prompts.  Returns the content of `summary.json`.
    """
    with show.waiting("fetching the model"):
        fetch()  # first, because without the model minutes of work would end without a summary
    folder = out or result_folder()
    started = time.monotonic()
    environment = snapshot()
    show.line(f"rooflab on {environment.gpu.name if environment.gpu else environment.cpu}\n", "bold")

    device = pick_device(None)
    scheme = default_scheme(device)
    checked = Selection.of(None, None, ["smoke"] if smoke else ["smoke", "edge"], None, [scheme], None)
    asked = [_shortened(item) for item in listed_checks(checked)]
    with show.progress("1 check", len(asked)) as advance:
        results = run_checks(asked, device, folder, lambda result: advance(result.kernel))
    checks = summarize_checks(results)
    wrong = sum(int(row["failed"]) for row in checks)
    for result in results:
        if result.status not in ("OK", *NOT_RUN):
            show.line(result.describe(), "red")
    show.line(f"{sum(int(row['ok']) for row in checks)} right, {wrong} wrong; {LEFT_OUT.format(scheme=scheme)}\n")

    benched = Selection.of(None, None, ["smoke" if smoke else "smollm2_135m"], None, None, None)
    with show.progress("2 bench", count_benches(benched)) as advance:
        records = run_benches(benched, folder, 0.1 if smoke else BENCH_S, advance)
    for record in records:
        if record.status not in ("OK", "NOISY", *NOT_RUN):
            show.failure(bench_row(record))
    if noisy := sum(record.status == "NOISY" for record in records):
        show.line(f"{noisy} times are NOISY: the machine was busy; no ratio is made of them", "yellow")
    with show.waiting("3 roofline"):
        figures = draw_records(records, folder)
    engine, ops = _run_engine(folder, smoke)
    best = best_of_each_op(records)
    for text in (found := findings(records, partial(_default, ops))):
        show.line(text, "yellow")
    show.table(best, ("op", "case", "naive_ms", "library_ms", "best", "best_ms", "vs_library", "vs_naive"), "Kernels")
    show.table(engine["runs"], ("run", "status", "num_prompt_tokens", "num_output_tokens", *_latencies()), "Engine")
    show.line(f"\nroofline: {', '.join(path.name for path in figures)}")
    summary = {
        "wrong": wrong,
        "statuses": sorted(({result.status for result in results} | {record.status for record in records}) - {"NOISY"}),
        "noisy": noisy,
        "seconds": round(time.monotonic() - started, 1),
        "folder": str(folder),
        "findings": found,
        "best": best,
        "checks": checks,
        "benches": [bench_row(record) for record in records],
        "figures": [path.name for path in figures],
        "engine": engine,
    }
    (folder / "summary.json").write_text(json.dumps(plain(summary), indent=2, allow_nan=False) + "\n")
    (folder / "summary.md").write_text(_markdown(summary, records))
    show.line(f"all results are in {folder}, after {summary['seconds']:.0f} s; start with summary.md", "bold")
    return summary


def _shortened(item: Asked) -> Asked:
    """The check; without planted inputs if Triton's interpreter would run an edge case, which takes minutes."""
    smoke = item.case in registry.get_op(item.kernel.op).get_cases("smoke")
    return item._replace(planted=smoke or item.kernel.backend in registry.CPU_BACKENDS or not interpreting())


def best_of_each_op(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each op, at its largest case: the times of the naive, the library and the fastest kernel, and the
    fastest kernel's speed-ups. Kernels that failed their check or were not timed do not count; a NOISY time is shown as
    such, is never the fastest, and gives no speed-up."""
    rows = []
    timed = [record for record in largest_cases(records) if record.status in ("OK", "NOISY")]
    times = {(record.op, record.kernel): record.latency_median_ms for record in timed if record.status == "OK"}
    noisy = {(record.op, record.kernel): record.latency_median_ms for record in timed if record.status == "NOISY"}
    for op, case in {record.op: record.case_id for record in timed if record.latency_median_ms}.items():
        own = {kernel: ms for (of, kernel), ms in times.items() if of == op and ms}
        best = min(own, key=lambda kernel: own[kernel]) if own else None
        row: dict[str, Any] = {"op": op, "case": case}
        for name in ("naive", "library"):
            unsure = noisy.get((op, name))
            row[f"{name}_ms"] = own.get(name) if unsure is None else f"{show.number(unsure)} NOISY"
        row |= {"best": best, "best_ms": own[best] if best else None}
        for name in ("library", "naive"):
            row[f"vs_{name}"] = f"{own[name] / own[best]:.2f}x" if best and name in own else None
        rows.append(row)
    return rows


def _default(ops: OpSet, op: str, case: Case) -> str | None:
    """The kernel that the engine took for a step of this case's size; None if it does not use the op."""
    bucket = launch_bucket(op, rows_of(case) or 1)
    return next((own.kernel.name for own in ops.choices if (own.op, own.bucket) == (op, bucket)), None)


def _run_engine(folder: Path, smoke: bool) -> tuple[dict[str, Any], OpSet]:
    """Answers the first prompt alone, and then all prompts at once; returns the results and the kernels."""
    prompts = PROMPT_SET[:2] if smoke else PROMPT_SET
    params = SamplingParams(max_tokens=16 if smoke else 64)
    with show.waiting("4 engine    loading the model"):
        llm = LLM(max_num_seqs=len(prompts), prefix_caching=False)  # the first prompt comes twice
        warm_up(llm)
    show.line(f"4 engine    {llm.arch.name} on {llm.device.type} in {llm.dtype_name}", "bold")
    show.line(f"            kernels: {', '.join(f'{op}={name}' for op, name in kernel_names(llm).items())}\n")
    show.line(f"> {prompts[0]}", "dim")
    alone = stream_one(llm, as_prompt(llm, prompts[0]), params, lambda event: show.piece(event.text))
    show.line("\n")
    with show.waiting(f"            {len(prompts)} prompts at once"):
        together = run_batch(llm, [as_prompt(llm, prompt) for prompt in prompts], params)
    writer = RunWriter(folder)
    rows = []
    for name, run in (("one prompt", alone), (f"{len(prompts)} prompts at once", together)):
        writer.write(engine_record(llm, run, name, {"max_tokens": params.max_tokens}, writer.run_id))
        rows.append({"run": name, "status": run.status, "reason": run.noise, **asdict(run.summary)})
    result = {
        "model": llm.arch.name,
        "runs": rows,
        "answers": [
            {"prompt": prompt, "text": result["text"]} for prompt, result in zip(prompts, together.outputs, strict=True)
        ],
        "first_answer": alone.outputs[0]["text"],
    }
    return result, llm.ops


def _latencies() -> Sequence[str]:
    names = LatencySummary.__dataclass_fields__
    return [name for name in names if name.startswith(("ttft_p50", "itl_", "output_tokens"))]


def _markdown(summary: dict[str, Any], records: Sequence[Record]) -> str:
    """The summary as a page, with the most important results first."""
    timed = [record for record in records if record.latency_median_ms is not None and record.status == "OK"]
    lines = [
        "# The lab on this machine",
        "",
        *(f"- {text}" for text in summary["findings"]),
        "" if summary["findings"] else "No default is slower than the library, and nothing is slower than naive.\n",
        f"{sum(int(row['ok']) for row in summary['checks'])} checks right, {summary['wrong']} wrong; "
        f"{len(timed)} times measured, {summary['noisy']} NOISY; {summary['seconds']:.0f} s in all.",
        "",
        "## Naive, library and best, at each op's largest case",
        "",
        "| op | case | naive, ms | library, ms | best here | ms | library / best | naive / best |",
        "|---|---|--:|--:|---|--:|--:|--:|",
    ]
    for row in summary["best"]:
        names = ("op", "case", "naive_ms", "library_ms", "best", "best_ms", "vs_library", "vs_naive")
        lines.append(_row(*(row[name] for name in names)))
    lines += [
        "",
        f"## Engine: {summary['engine']['model']}",
        "",
        "| run | status | TTFT p50, ms | ITL p50, ms | ITL p99, ms | tokens/s |",
    ]
    lines += ["|---|---|--:|--:|--:|--:|"]
    for row in summary["engine"]["runs"]:
        latencies = ("run", "status", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "output_tokens_per_s")
        lines.append(_row(*(row[name] for name in latencies)))
    lines += ["", "## Roofline", ""]
    lines += [f"![roofline]({name})" for name in summary["figures"] if name.endswith(".png")]
    lines += ["", "## Answers", ""]
    for answer in summary["engine"]["answers"]:
        lines += [f"> {answer['prompt']}", "", answer["text"].strip(), ""]
    lines += ["## Every time", "", "| op | kernel | case | ms | of bound | limited by |", "|---|---|---|--:|--:|---|"]
    for record in timed:
        fraction = "" if record.bound_fraction is None else f"{record.bound_fraction:.0%}"
        latency = f"{record.latency_median_ms:.4g}"
        lines.append(_row(record.op, record.kernel, record.case_id, latency, fraction, record.limiter))
    return "\n".join(lines) + "\n"


def _row(*cells: Any) -> str:
    texts = ("" if cell is None else show.number(cell) if isinstance(cell, float) else str(cell) for cell in cells)
    return f"| {' | '.join(texts)} |"

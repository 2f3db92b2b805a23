"""The main job: everything the lab does, once, on the machine at hand, and a summary of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rooflab.bench import show
from rooflab.bench.calls.selection import Selection, default_scheme, pick_device
from rooflab.bench.commands import (
    count_benches,
    count_checks,
    run_benches,
    run_checks,
    summarize_checks,
)
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
from rooflab.bench.records.record import Record, plain
from rooflab.bench.report.figures import bench_row, draw_records
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.metrics import LatencySummary
from rooflab.engine.model_files import fetch


def run_lab(out: Path | None = None, smoke: bool = False) -> dict[str, Any]:
    """Checks, times and draws every kernel, then answers real prompts; all in one folder.

    `smoke` does the same with fewer cases and prompts.  Returns what `summary.json` holds.
    """
    with show.waiting("fetching the model"):
        fetch()  # first: with no network there would be no engine run and no summary after minutes of work
    folder = out or result_folder()
    started = time.monotonic()
    environment = snapshot()
    show.line(f"rooflab on {environment.gpu.name if environment.gpu else environment.cpu}\n", "bold")

    # One scheme: Triton's interpreter takes four minutes for all three, which `rooflab check` and the tests run.
    scheme = default_scheme(pick_device(None))
    checked = Selection.of(None, None, ["smoke"] if smoke else ["smoke", "edge"], None, [scheme], None)
    with show.progress("1 check   ", count_checks(checked)) as advance:
        results = run_checks(checked, folder, advance)
    checks = summarize_checks(results)
    wrong = sum(int(row["failed"]) for row in checks)
    show.table(checks, ("op", "kernel", "role", "ok", "failed", "not run", "checked_by", "worst"), "Checks")
    show.line(f"{sum(int(row['ok']) for row in checks)} right, {wrong} wrong\n")

    benched = Selection.of(None, None, ["smoke" if smoke else "smollm2_135m"], None, None, None)
    with show.progress("2 bench   ", count_benches(benched)) as advance:
        records = run_benches(benched, folder, 0.1 if smoke else 0.4, advance)
    show.bench_table([bench_row(record) for record in records], "Times")

    figures = draw_records(records, folder)
    show.line(f"\n3 roofline  {', '.join(path.name for path in figures)}\n")

    engine = _run_engine(folder, smoke)
    summary = {
        "wrong": wrong,
        "statuses": sorted({result.status for result in results} | {record.status for record in records}),
        "seconds": round(time.monotonic() - started, 1),
        "folder": str(folder),
        "checks": checks,
        "benches": [bench_row(record) for record in records],
        "figures": [path.name for path in figures],
        "engine": engine,
    }
    (folder / "summary.json").write_text(json.dumps(plain(summary), indent=2, allow_nan=False) + "\n")
    (folder / "summary.md").write_text(_markdown(summary, records))
    show.line(f"\nall of it in {folder}, in {summary['seconds']:.0f} s; start with summary.md", "bold")
    return summary


def _run_engine(folder: Path, smoke: bool) -> dict[str, Any]:
    """Answers the prompt set one by one and then all at once."""
    prompts = PROMPT_SET[:2] if smoke else PROMPT_SET
    params = SamplingParams(max_tokens=16 if smoke else 64)
    with show.waiting("4 engine    loading the model"):
        llm = LLM(max_num_seqs=len(prompts))
        warm_up(llm)
    show.line(f"4 engine    {llm.arch.name} on {llm.device.type} in {str(llm.dtype).removeprefix('torch.')}", "bold")
    show.line(f"            kernels: {', '.join(f'{op}={name}' for op, name in kernel_names(llm).items())}\n")
    show.line(f"> {prompts[0]}", "dim")
    output, alone = stream_one(llm, as_prompt(llm, prompts[0]), params, lambda event: show.piece(event.text))
    show.line("\n")
    outputs, together = run_batch(llm, [as_prompt(llm, prompt) for prompt in prompts], params)
    writer = RunWriter(folder)
    rows = []
    for name, summary in (("one prompt", alone), (f"{len(prompts)} prompts at once", together)):
        writer.write(engine_record(llm, summary, name, {"max_tokens": params.max_tokens}, writer.run_id))
        rows.append({"run": name, **asdict(summary)})
    show.table(rows, ("run", "num_prompt_tokens", "num_output_tokens", *_latencies()), "Engine")
    return {
        "model": llm.arch.name,
        "runs": rows,
        "answers": [
            {"prompt": prompt, "text": result["text"]} for prompt, result in zip(prompts, outputs, strict=True)
        ],
        "first_answer": output["text"],
    }


def _latencies() -> Sequence[str]:
    names = LatencySummary.__dataclass_fields__
    return [name for name in names if name.startswith(("ttft_p50", "itl_", "output_tokens"))]


def _markdown(summary: dict[str, Any], records: Sequence[Record]) -> str:
    """The summary as a page: what a person wants to know first."""
    timed = [record for record in records if record.latency_median_ms is not None and record.status == "OK"]
    lines = [
        "# The lab on this machine",
        "",
        f"{sum(int(row['ok']) for row in summary['checks'])} checks right, {summary['wrong']} wrong; "
        f"{len(timed)} kernels timed; {summary['seconds']:.0f} s in all.",
        "",
        "## Engine",
        "",
        f"{summary['engine']['model']}:",
        "",
        "| run | TTFT p50, ms | ITL p50, ms | ITL p99, ms | tokens/s |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in summary["engine"]["runs"]:
        cells = (row["ttft_p50_ms"], row["itl_p50_ms"], row["itl_p99_ms"], row["output_tokens_per_s"])
        lines.append(f"| {row['run']} | " + " | ".join("" if cell is None else f"{cell:.1f}" for cell in cells) + " |")
    lines += ["", "## Answers", ""]
    for answer in summary["engine"]["answers"]:
        lines += [f"> {answer['prompt']}", "", answer["text"].strip(), ""]
    lines += ["## Roofline", ""]
    lines += [f"![roofline]({name})" for name in summary["figures"] if name.endswith(".png")]
    lines += ["", "## Kernels", "", "| op | kernel | case | ms | of bound | limited by |", "|---|---|---|--:|--:|---|"]
    for record in timed:
        fraction = "" if record.bound_fraction is None else f"{record.bound_fraction:.0%}"
        texts = (record.op, record.kernel, record.case_id, f"{record.latency_median_ms:.4g}", fraction, record.limiter)
        lines.append("| " + " | ".join(map(str, texts)) + " |")
    return "\n".join(lines) + "\n"

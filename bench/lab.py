"""Runs every part of Rooflab once on this machine, the most valuable part first, and writes a summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rooflab.bench import show
from rooflab.bench.base.plain import plain
from rooflab.bench.base.system_time import time
from rooflab.bench.checks.checking import run_checks, summarize_checks
from rooflab.bench.checks.drawn import listed_checks
from rooflab.bench.commands import count_benches, run_benches
from rooflab.bench.compile.cases import largest_case
from rooflab.bench.core import (
    NOT_RUN,
    Checkers,
    CheckResult,
    CheckTask,
    Environment,
    Record,
    RunWriter,
    Selection,
    Settings,
    default_scheme,
    first_case,
    pick_device,
    result_folder,
)
from rooflab.bench.engine.runs import (
    PROMPT_SET,
    EngineRun,
    as_prompt,
    engine_record,
    kernel_names,
    run_batch,
    stream_one,
    warm_up,
)
from rooflab.bench.report.figures import bench_row, draw_records, largest_cases
from rooflab.bench.report.page import write_report
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.model_files import fetch
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import get_scheme
from rooflab.roofline.numbers import digits

BENCH_BUDGET_S = 0.15
"""Seconds of timing for each kernel and case."""
BENCH_FLOPS = 2e9
"""The most FLOPs of a timed case.  5e9 (attention of 2,048 tokens) take a naive kernel half a second on two cores."""
ROW_FORMAT = "{:<22} {:>8} {:>8}  {:<11} {:>8} {:>7} {:>7} {:>6}"
HEADER = ROW_FORMAT.format("op", "naive ms", "library", "best here", "ms", "library", "of roof", "right")
LEFT_OUT = (
    "checked on smoke cases in {scheme}, also planted ones, and timed at large sizes of SmolLM2-135M; left out: "
    "other dtypes, edge cases and drawn cases, all but the first case of an interpreted kernel (`rooflab check`), and "
    "other sizes (`rooflab bench`)"
)
NEXT_COMMANDS = (
    ("rooflab check gemm", "the same checks on other dtypes and on cases that a seed draws"),
    ("rooflab bench --kernel mine.py", "a kernel of your own, checked, timed and drawn beside these"),
    ('rooflab generate "Why is the sky blue?" --swap gemm=library', "what one kernel does to TTFT and ITL"),
)


def run_lab(out: Path | None = None, smoke: bool = False) -> dict[str, Any]:
    """Answers a real prompt, then checks, times and plots every kernel.  All results go to one folder.

    With `smoke`, uses fewer prompts and tokens.  Returns the content of `summary.json`."""
    with show.waiting("fetching the model"):
        fetch()  # first, because without the model minutes of work would end without a summary
    result_dir = out or result_folder()
    start_time = time.monotonic()
    environment = Environment.now()
    show.line(f"rooflab on {environment.gpu.name if environment.gpu else environment.cpu}\n", "bold")
    run_writer = RunWriter(result_dir)
    engine_results = _run_engine(run_writer, smoke)
    results, records = _run_kernels(run_writer, smoke)
    checks, scheme = summarize_checks(results), default_scheme(pick_device(None))
    wrong_count = sum(int(row["failed"]) for row in checks)
    noisy_count = sum(record.status == "NOISY" for record in records)
    show.line(
        f"\n{sum(int(row['ok']) for row in checks)} checks right, {wrong_count} wrong; {LEFT_OUT.format(scheme=scheme)}"
    )
    if noisy_count:
        show.line(f"{noisy_count} times are NOISY: the machine was busy; no ratio is made of them", "yellow")
    with show.waiting("3 pictures"):
        figure_paths = draw_records(records, result_dir)
        lab_report = write_report([result_dir], result_dir / "report.html", "The lab on this machine")
    lab_summary = {
        "wrong": wrong_count,
        "statuses": sorted(({result.status for result in results} | {record.status for record in records}) - {"NOISY"}),
        "noisy": noisy_count,
        "seconds": round(time.monotonic() - start_time, 1),
        "folder": str(result_dir),
        "best": best_of_each_op(records),
        "checks": checks,
        "benches": [bench_row(record) for record in records],
        "figures": [fig_path.name for fig_path in figure_paths],
        "engine": engine_results,
    }
    write_whole(result_dir / "summary.json", json.dumps(plain(lab_summary), indent=2, allow_nan=False) + "\n")
    png_text = ", ".join(str(result_dir / fig_path.name) for fig_path in figure_paths if fig_path.suffix == ".png")
    show.line(f"\n3 roofline  {png_text or 'none: every time is NOISY'}", "bold")
    show.line(f"  report    {lab_report['file']}")
    show.line(f"  all       {result_dir / 'summary.json'}, after {lab_summary['seconds']:.0f} s")
    show.line("\nnext:")
    show.pairs([(next_command, command_reason) for next_command, command_reason in NEXT_COMMANDS])
    return lab_summary


def _run_kernels(writer: RunWriter, smoke: bool) -> tuple[list[CheckResult], list[Record]]:
    """Checks and times the kernels of every op. Prints a line for each op when it is done."""
    device = pick_device(None)
    suite_name, budget_s = ("smoke", 0.1) if smoke else ("smollm2_135m", BENCH_BUDGET_S)
    results: list[CheckResult] = []
    records: list[Record] = []
    show.line("\n2 kernels   against the fp64 oracle, then timed", "bold")
    show.line(HEADER, "dim")
    checkers = Checkers(device)
    for op, op_spec in registry.ops().items():
        op_scheme = default_scheme(device, op_spec)
        op_checks = few_checks(listed_checks(Selection.of(op, None, ["smoke"], None, [op_scheme], None)))
        case = largest_case(op_spec, op_spec.get_cases(suite_name), get_scheme(op_scheme), BENCH_FLOPS)
        benches = Selection.of(op, None, [], [case.id], [op_scheme], None)
        with show.progress(op, len(op_checks) + count_benches(benches), ended=False) as move_bar:
            op_results = run_checks(op_checks, checkers, writer, lambda result: move_bar(result.kernel))
            wrong_names = {result.kernel for result in op_results if result.status not in ("OK", *NOT_RUN)}
            passed_names = {result.kernel for result in op_results if result.status == "OK"} - wrong_names
            passed_kernels = frozenset((f"{op}/{kernel_name}", op_scheme) for kernel_name in passed_names)
            timings = run_benches(benches, Settings(budget_s=budget_s), writer, move_bar, planted_before=passed_kernels)
        _show_op(op, op_results, timings)
        results += op_results
        records += timings
    return results, records


def few_checks(checks: Sequence[CheckTask]) -> list[CheckTask]:
    """Keeps only the first fitting case (sizes) of each kernel that Triton's interpreter runs, because a case takes
    seconds.  Keeps all checks of other kernels."""
    case_of = {task.kernel: first_case(task.kernel, registry.get_op(task.kernel.op), task.scheme) for task in checks}
    slow_set = {kernel for kernel in case_of if registry.interpreting() and kernel.backend not in registry.CPU_BACKENDS}
    return [task for task in checks if task.kernel not in slow_set or task.case == (case_of[task.kernel] or task.case)]


def _show_op(op: str, results: Sequence[CheckResult], records: Sequence[Record]) -> None:
    (best_row,) = best_of_each_op(records) or [{}]
    best_kernel = best_row.get("best")
    roof = next((bench_record.bound_fraction for bench_record in records if bench_record.kernel == best_kernel), None)
    texts = [_short(best_row.get(f"{row_name}_ms")) for row_name in ("naive", "library", "best")]
    ratio_text, ok_count = best_row.get("vs_library") or "", sum(result.status == "OK" for result in results)
    show.line(
        ROW_FORMAT.format(
            op, *texts[:2], best_kernel or "-", texts[2], ratio_text, "" if roof is None else f"{roof:.0%}", ok_count
        )
    )
    for result in results:
        if result.status not in ("OK", *NOT_RUN):
            show.line(f"  {result.describe()}", "red")
    for bench_record in records:
        if bench_record.status not in ("OK", "NOISY", *NOT_RUN):
            show.failure(bench_row(bench_record))


def _short(ms: float | str | None) -> str:
    """Formats a time in ms. A NOISY (unreliable) time begins with `~`."""
    return "" if ms is None else f"~{ms.removesuffix(' NOISY')}" if isinstance(ms, str) else digits(ms)


def best_of_each_op(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Compares the fastest kernel of each op with the naive and library kernels.  Returns a row for each op.

    A row has times and speed-ups at the op's largest case (sizes).  Kernels without a correct result or a time are left
    out.  A NOISY (unreliable) time is marked and not compared."""
    rows = []
    timings = [record for record in largest_cases(records) if record.status in ("OK", "NOISY")]
    ok_ms = {(record.op, record.kernel): record.latency_median_ms for record in timings if record.status == "OK"}
    noisy_ms = {(record.op, record.kernel): record.latency_median_ms for record in timings if record.status == "NOISY"}
    for op, case in {record.op: record.case_id for record in timings if record.latency_median_ms}.items():
        kernel_ms = {kernel: time_ms for (kernel_op, kernel), time_ms in ok_ms.items() if kernel_op == op and time_ms}
        winner = min(kernel_ms, key=lambda kernel: kernel_ms[kernel]) if kernel_ms else None
        row: dict[str, Any] = {"op": op, "case": case}
        for name in ("naive", "library"):
            noisy_time = noisy_ms.get((op, name))
            row[f"{name}_ms"] = kernel_ms.get(name) if noisy_time is None else f"{digits(noisy_time)} NOISY"
        row |= {"best": winner, "best_ms": kernel_ms[winner] if winner else None}
        for name in ("library", "naive"):
            row[f"vs_{name}"] = f"{kernel_ms[name] / kernel_ms[winner]:.2f}x" if winner and name in kernel_ms else None
        rows.append(row)
    return rows


def _run_engine(writer: RunWriter, smoke: bool) -> dict[str, Any]:
    """Generates an answer to the first prompt alone, then to all prompts at once. Returns the results."""
    prompts = PROMPT_SET[:2] if smoke else PROMPT_SET
    sampling_params = SamplingParams(max_tokens=16 if smoke else 64)
    with show.waiting("1 engine    loading the model"):
        llm = LLM(max_num_seqs=len(prompts), prefix_caching=False)  # the first prompt comes twice
        warm_up(llm)
    show.line(f"1 engine    {llm.arch.name} on {llm.device.type} in {llm.dtype_name}", "bold")
    show.line(f"            kernels: {', '.join(f'{op}={name}' for op, name in kernel_names(llm).items())}\n")
    show.line(f"> {prompts[0]}", "dim")
    single_run = stream_one(llm, as_prompt(llm, prompts[0]), sampling_params, lambda event: show.piece(event.text))
    show.line(f"\n\nTTFT {single_run.summary.ttft_p50_ms:.0f} ms, {_itl(single_run)}", "bold")
    with show.waiting(f"            {len(prompts)} prompts at once"):
        batch_run = run_batch(llm, [as_prompt(llm, prompt_text) for prompt_text in prompts], sampling_params)
    rows = []
    for name, engine_run in (("one prompt", single_run), (f"{len(prompts)} prompts at once", batch_run)):
        writer.write(engine_record(llm, engine_run, name, {"max_tokens": sampling_params.max_tokens}, writer.run_id))
        rows.append(
            {"run": name, "status": engine_run.status, "reason": engine_run.noise, **asdict(engine_run.summary)}
        )
    return {
        "model": llm.arch.name,
        "runs": rows,
        "answers": [
            {"prompt": prompt_text, "text": result["text"]}
            for prompt_text, result in zip(prompts, batch_run.outputs, strict=True)
        ],
        "first_answer": single_run.outputs[0]["text"],
    }


def _itl(run: EngineRun) -> str:
    run_summary = run.summary
    itl_text = "no ITL: one token" if run_summary.itl_p50_ms is None else f"ITL {run_summary.itl_p50_ms:.1f} ms (p50)"
    return f"{itl_text}, {run_summary.output_tokens_per_s:.1f} tokens/s{f'; NOISY: {run.noise}' if run.noise else ''}"

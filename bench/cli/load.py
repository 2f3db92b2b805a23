"""Defines the commands `load` and `latency`, which measure the latencies of a server or of the engine itself."""

from __future__ import annotations

import json as json_text
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooflab.bench import show
from rooflab.bench.base.plain import Json, Row
from rooflab.bench.base.system_time import time
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for
from rooflab.roofline.numbers import digits

if TYPE_CHECKING:
    from rooflab.bench.load.client import Endpoint
    from rooflab.bench.load.load_run import Plan
    from rooflab.bench.load.trace import Trace

SUMMARY_COLUMNS = (
    "rate", "requests", "failed", "status", "requests_per_s", "goodput_requests_per_s", "output_tokens_per_s",
    "steady_output_tokens_per_s", "client_late_p50_ms",
)  # fmt: skip
WAIT_COLUMNS = (
    "rate", "ttft_p50_ms", "ttft_p99_ms", "ttft_sent_p50_ms", "ttft_sent_p99_ms", "itl_p50_ms", "itl_p99_ms",
    "chunk_gap_p50_ms", "tpot_p50_ms", "e2e_p50_ms", "e2e_p99_ms", "tokens_per_step", "acceptance",
)  # fmt: skip


@app.command()
@option.grouped
def load(
    *,
    url: Annotated[str, typer.Option(help="The server, which takes OpenAI's protocol.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(help="The endpoint: completions or chat.")] = "completions",
    model: Annotated[str | None, typer.Option(help="The model; without it, the first of GET /v1/models.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="A key, sent as a bearer token.")] = None,
    rate: option.Rate = None,
    sweep: option.Sweep = None,
    concurrency: option.Concurrency = None,
    num_prompts: Annotated[int, typer.Option(help="Number of requests.")] = 100,
    warmup: Annotated[int, typer.Option(help="Requests before the run, one after the other.")] = 1,
    data: option.Data = "random",
    lengths: option.TokenSpans,
    prefix_len: Annotated[int, typer.Option(help="With --data prefix: tokens of a prefix.")] = 256,
    groups: Annotated[int, typer.Option(help="With --data prefix: number of prefixes.")] = 4,
    text: Annotated[bool, typer.Option("--text", help="Send words; the server counts their tokens.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of exactly --output-len tokens.")] = True,
    extra_body: Annotated[str, typer.Option(help="More fields for each request, as a JSON object.")] = "{}",
    goodput: Annotated[list[str] | None, typer.Option(help="A limit in ms: ttft:500 (or itl, tpot, e2e).")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds in which an answer must end.")] = 600.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of prompts and arrivals; without it, from the clock.")
    ] = None,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Send requests to a server; measure TTFT, ITL, throughput, goodput.  Stores the time of each chunk of answers."""
    from rooflab.bench.load.client import Endpoint
    from rooflab.bench.load.data import Data
    from rooflab.bench.load.load_run import ENDPOINT_PATHS, Plan, first_model
    from rooflab.bench.load.metrics import check_limits

    goodput_limits = check_limits(goodput or [])
    token_id_range = None if text or endpoint == "chat" else Data.ids
    prompts = Data(data, *lengths.spans, prefix_len, groups, token_id_range)
    rates = rates_of(rate, sweep, concurrency)
    plan = Plan(
        rate=rates[0], concurrency=concurrency or 1, num_prompts=num_prompts, warmup=warmup, data=prompts,
        endpoint=endpoint, model=model or "", ignore_eos=ignore_eos, extra=_fields(extra_body),
        seed=time.time_ns() % 2**32 if seed is None else seed,
    )  # fmt: skip
    server_endpoint = Endpoint(url, ENDPOINT_PATHS[plan.endpoint], api_key, timeout)
    plan = plan if model else replace(plan, model=first_model(server_endpoint))
    show.note(f"seed {plan.seed}")
    # A seed for each rate: with the same prompts again, the server would find them in its prefix cache.
    plans = [replace(plan, rate=of_run, seed=plan.seed + index) for index, of_run in enumerate(rates)]
    _load(server_endpoint, plans, goodput_limits, out)


def _load(target: Endpoint, plans: list[Plan], limits: dict[str, float], out: Path | None) -> None:
    from rooflab.bench.core import RunWriter, result_folder
    from rooflab.bench.load import load_record
    from rooflab.bench.load.causes import LONG_GAP_RATIO, spikes
    from rooflab.bench.load.load_run import run_load
    from rooflab.bench.load.metrics import failures, remarks

    folder = out or result_folder()
    writer, rows, traces, files = RunWriter(folder), list[Row](), list[Any](), list[Path]()
    for load_plan in plans:
        run_name = name_of(load_plan) if len(plans) > 1 else ""
        with show.waiting(f"load {name_of(load_plan)}"):
            trace = run_load(target, load_plan)
        record = load_record.record_of(trace, limits, writer.run_id)
        writer.write(record)
        files.append(trace.save(load_record.trace_file(folder, run_name)))
        traces.append(trace)
        rows.append({"rate": name_of(load_plan), "status": record.status, "reason": record.reason, **record.metrics})
    has_answers = any(row["requests"] > row["failed"] for row in rows)
    failure_counts, run_notes = [failures(trace) for trace in traces], [remarks(trace) for trace in traces]
    for columns in (SUMMARY_COLUMNS, WAIT_COLUMNS):
        show.table(rows, columns, filled=True)
    for row, failure_reasons, run_remarks in zip(rows, failure_counts, run_notes, strict=True):
        for failure_reason, event_count in failure_reasons.items():
            show.line(f"{row['rate']}: {event_count} failed: {failure_reason}", "red")
        if row["reason"]:
            show.line(f"{row['rate']}: {row['status']}: {row['reason']}", "yellow")
        for run_remark in run_remarks:
            show.line(f"{row['rate']}: {run_remark}", "yellow")
    for row, trace in zip(rows, traces, strict=True):
        for spike_kind, event_count in Counter(latency_spike.kind for latency_spike in spikes(trace)).most_common():
            show.line(f"{row['rate']}: {event_count} gaps of over {LONG_GAP_RATIO} medians: {spike_kind}")
    files += draw(folder, plans, rows, traces) if has_answers else []  # after the tables, because it may fail
    file_names = [file_path.name for file_path in (writer.path, *files)]
    summary = {"seed": plans[0].seed, "folder": folder, "files": file_names, "rows": rows, "failures": failure_counts}
    show.result({**summary, "remarks": run_notes})
    show.note(f"records, traces and figures: {folder}")
    exit_for({load_record.exit_status(trace) for trace in traces})


def draw(folder: Path, plans: list[Plan], rows: list[Row], traces: list[Trace]) -> list[Path]:
    """Draws a waterfall plot per run.  With several rates, also draws latency against rate and throughput."""
    from rooflab.bench.load import load_pictures

    plan_case = plans[0].case()
    caption = f"{plan_case['model']}, {plan_case['data']} data, {plan_case['arrivals']} arrivals, seed {plans[0].seed}."
    if len(plans) == 1:
        return [load_pictures.draw_waterfall(traces[0], folder, caption)]
    rate_points = [(plan.rate, row) for plan, row in zip(plans, rows, strict=True) if plan.rate]
    files = [load_pictures.draw_rates(rate_points, folder, caption, is_throughput) for is_throughput in (False, True)]
    return files + [
        load_pictures.draw_waterfall(trace, folder, caption, f"waterfall-{name_of(plan)}")
        for plan, trace in zip(plans, traces, strict=True)
    ]


def name_of(plan: Plan) -> str:
    """Returns a short name for a run: its request rate, or its number of concurrent requests."""
    return f"{plan.concurrency} at once" if plan.rate is None else f"{plan.rate:g}"


def _rate(text: str) -> float:
    """Parses one rate of `--sweep`, in requests per second."""
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"sweep: expected requests per second, got {text!r}") from error


def rates_of(rate: float | None, sweep: str | None, concurrency: int | None) -> list[float | None]:
    """Returns the request rate of each run: `rate`, or each rate in `sweep`.  In a closed loop, which has neither,
    returns `[None]`: no rate sets the request times."""
    load_options = {"rate": rate, "sweep": sweep, "concurrency": concurrency}
    given_options = [option_name for option_name, value in load_options.items() if value is not None]
    if len(given_options) > 1:
        raise ValueError(f"{given_options[1]}: expected one of {', '.join(load_options)}, got {given_options[0]} too")
    if sweep is not None:
        sweep_rates = [_rate(rate_text) for rate_text in sweep.split(",")]
        if len(set(sweep_rates)) < len(sweep_rates) or not all(map(math.isfinite, sweep_rates)):
            raise ValueError(f"sweep: expected finite rates, each once, got {sweep!r}")
        return [*sweep_rates]
    return [rate]


def _fields(text: str) -> dict[str, Json]:
    try:
        value = json_text.loads(text)
    except json_text.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"extra_body: expected a JSON object, got {text!r}")
    return value


@app.command()
@option.grouped
def latency(
    engine: option.EngineOptions,
    *,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Requests, which all come at once.")] = 1,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Measure TTFT, ITL and tokens per second of one batch directly on the engine, without a server."""
    from rooflab.bench.load.in_process import measure

    batch_shape = {"input_len": input_len, "output_len": output_len, "batch_size": batch_size}
    with show.waiting(f"latency of {engine.model}"):
        latencies = measure(engine.options(), batch_shape, out)
    show.result(latencies)
    show.pairs([(key, digits(value) if isinstance(value, float) else str(value)) for key, value in latencies.items()])
    exit_for({latencies["status"]})

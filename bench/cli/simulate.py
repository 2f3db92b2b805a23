"""Defines the command `simulate`, which runs the engine's scheduler in simulated time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app
from rooflab.bench.cli.load import WAIT_COLUMNS, draw, name_of, rates_of

if TYPE_CHECKING:
    from rooflab.bench.latency.step_model import KernelTimes, StepModel


@dataclass(frozen=True)
class PublishedTimes:
    """Options for a model, a GPU, and the kernel times that others published for this GPU."""

    model: Annotated[str, typer.Argument(help="A preset, or a Hugging Face config.json or its folder.")] = (
        "llama-3.1-8b"
    )
    gpu: Annotated[str, typer.Option("--gpu", help="A GPU by name.")] = "h100-sxm"
    dtype: option.WeightsDtype = "bf16"
    kv_dtype: option.KvDtype = "bf16"
    host_ms: Annotated[float, typer.Option(help="The host's time in each step, which kernel times do not have.")] = 0.0
    bounds: Annotated[bool, typer.Option("--bounds", help="By bounds, also where kernel times were published.")] = False

    def kernels(self, gpus: int, lengths: option.TokenSpans | None = None) -> KernelTimes:
        """Returns the kernel times that others published.  Raises `ValueError` on an unknown model or GPU, or a value
        out of range.  Also raises it if the longest prompt plus answer of `lengths` exceeds the model's context."""
        from rooflab.bench.latency.step_model import KernelTimes
        from rooflab.roofline.architecture import get_architecture
        from rooflab.roofline.device import resolve

        model_arch = get_architecture(self.model)
        device, gpu_note = resolve(self.gpu)
        show.note(gpu_note)
        max_tokens = sum(upper_limit for _, upper_limit in lengths.spans) if lengths else 0
        if max_tokens > model_arch.max_position:
            upper_limit = f"{model_arch.max_position} tokens ({model_arch.name})"
            raise ValueError(f"input_len: expected with output_len at most {upper_limit}, got {max_tokens}")
        return KernelTimes(model_arch, device, self.dtype, self.kv_dtype, gpus, self.host_ms, bounds=self.bounds)


@app.command()
@option.grouped
def simulate(
    published: PublishedTimes,
    *,
    gpus: Annotated[int, typer.Option(help="GPUs of one node, with tensor parallelism.")] = 1,
    steps: Annotated[Path | None, typer.Option(help="Take the time of steps from this trace of our server.")] = None,
    against: Annotated[Path | None, typer.Option(help="A measured trace to compare with.")] = None,
    rate: option.Rate = None,
    sweep: option.Sweep = None,
    concurrency: option.Concurrency = None,
    num_prompts: int = 1000,
    data: option.Data = "random",
    lengths: option.TokenSpans,
    num_kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="Pages of the KV cache; without it, by memory; with --steps, no limit.")
    ] = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    prefill_chunk: int | None = None,
    seed: option.Seed = 0,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Run the engine's scheduler in simulated time, and show TTFT, ITL and throughput of a load.  Step times come from
    published kernel times, lower bounds, or measured steps.  No model runs, and no GPU is needed."""
    from rooflab.bench.latency import clock, step_model
    from rooflab.bench.load.data import Data
    from rooflab.bench.load.load_record import trace_file
    from rooflab.bench.load.load_run import Plan
    from rooflab.bench.load.metrics import summarize
    from rooflab.bench.load.trace import load_trace

    clock_settings = clock.ClockSettings(
        *(num_kv_blocks or 2**20, 16, max_num_seqs, max_num_batched_tokens, prefill_chunk),
        prefix_caching=data == "prefix",
    )
    model: StepModel
    delay_s = 0.0
    if steps:
        model, delay_s = step_model.of_trace(load_trace(steps))
    else:
        model = kernels = published.kernels(gpus, lengths)
        clock_settings = clock_settings if num_kv_blocks else clock_settings.fitting(kernels)
    if against and sweep:
        raise ValueError("against: expected one rate, and no --sweep")
    measured_trace = load_trace(against) if against else None
    plan = Plan(
        concurrency=concurrency or 1, num_prompts=num_prompts, data=Data(data, *lengths.spans), model=published.model
    )
    rates = rates_of(rate, sweep, concurrency)
    plans = [replace(plan, rate=of_run, seed=seed + index) for index, of_run in enumerate(rates)]
    rows, traces = [], []
    for plan in plans:
        with show.waiting(f"simulate {name_of(plan)}"):
            traces.append(clock.simulate(model, plan, clock_settings, delay_s))
        rows.append({"rate": name_of(plan), **summarize(traces[-1])})
    comparison_rows = clock.compared(traces[0], measured_trace) if measured_trace else []
    show.result({"basis": model.basis, "rows": rows, "compared": comparison_rows})
    columns = ("rate", "requests", "requests_per_s", "output_tokens_per_s", *WAIT_COLUMNS[1:])
    show.table(rows, [column for column in columns if column in rows[0] and "sent" not in column], f"by {model.basis}")
    if comparison_rows:
        show.table(comparison_rows, ("figure", "simulated", "measured", "off_%"), "beside the measured trace")
    if out:
        for plan, trace in zip(plans, traces, strict=True):
            trace.save(trace_file(out, name_of(plan) if len(plans) > 1 else ""))
        draw(out, plans, rows, traces)

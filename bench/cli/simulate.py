"""`simulate` and `capacity`: the engine's scheduler on a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflab.bench import show
from rooflab.bench.base.plain import Row
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app
from rooflab.bench.cli.load import WAITS, draw, laws, name_of

if TYPE_CHECKING:
    from rooflab.bench.latency.step_model import KernelTimes, StepModel


@dataclass(frozen=True)
class PublishedTimes:
    """A model on a GPU, by times of kernels that others published."""

    model: Annotated[str, typer.Argument(help="A preset, or a Hugging Face config.json or its folder.")] = (
        "llama-3.1-8b"
    )
    gpu: Annotated[str, typer.Option("--gpu", help="A GPU by name.")] = "h100-sxm"
    dtype: option.WeightsDtype = "bf16"
    kv_dtype: option.KvDtype = "bf16"
    host_ms: Annotated[float, typer.Option(help="The host's time in each step, which kernel times do not have.")] = 0.0
    bounds: Annotated[bool, typer.Option("--bounds", help="By bounds, also where kernel times were published.")] = False

    def kernels(self, gpus: int, lengths: option.TokenSpans | None = None) -> KernelTimes:
        """The times of kernels.  Raises `ValueError` on an unknown name, on a wrong number, and on `lengths` that the
        model does not have."""
        from rooflab.bench.latency.step_model import KernelTimes
        from rooflab.roofline.architecture import get_architecture
        from rooflab.roofline.device import resolve

        arch = get_architecture(self.model)
        device, note = resolve(self.gpu)
        show.note(note)
        longest = sum(most for _, most in lengths.spans) if lengths else 0
        if longest > arch.max_position:
            most = f"{arch.max_position} tokens ({arch.name})"
            raise ValueError(f"input_len: expected with output_len at most {most}, got {longest}")
        return KernelTimes(arch, device, self.dtype, self.kv_dtype, gpus, self.host_ms, bounds=self.bounds)


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
    drafts: option.Speculative,
    acceptance: Annotated[
        float, typer.Option(help="Chance that a drafted token is accepted if those before it were.")
    ] = 0.5,
    seed: option.Seed = 0,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """TTFT, ITL and throughput of a load, by the engine's scheduler in simulated time: with published times of kernels,
    with bounds, or with measured steps; nothing is computed, and no GPU is needed."""
    from rooflab.bench.latency import clock, step_model
    from rooflab.bench.latency.capacity import fitting
    from rooflab.bench.latency.speculation import priced
    from rooflab.bench.load.data import Data
    from rooflab.bench.load.load_record import trace_file
    from rooflab.bench.load.load_run import Plan
    from rooflab.bench.load.metrics import summarize
    from rooflab.bench.load.trace import load_trace

    drafted = drafts.num_speculative_tokens
    settings = clock.ClockSettings(
        *(num_kv_blocks or 2**20, 16, max_num_seqs, max_num_batched_tokens, prefill_chunk), acceptance=acceptance,
        prefix_caching=data == "prefix", num_speculative_tokens=drafted if drafts.speculate else 0,
    )  # fmt: skip
    taken: StepModel
    delay_s, prices = 0.0, list[Row]()
    if steps:
        taken, delay_s = step_model.of_trace(load_trace(steps))
    else:
        taken = own = published.kernels(gpus, lengths)
        settings = settings if num_kv_blocks else fitting(own, settings)
    if drafts.speculate:
        taken, context = drafts.steps(taken), sum(map(sum, lengths.spans)) // 2
        prices = [{"sequences": n, **priced(taken, n, context, drafted)} for n in (1, 4, 16, 64, 256)]
    arrivals = laws(rate, sweep, concurrency)
    if against and len(arrivals) > 1:
        raise ValueError("against: expected one rate, and no --sweep")
    measured = load_trace(against) if against else None
    plan = Plan(
        concurrency=concurrency or 1, num_prompts=num_prompts, data=Data(data, *lengths.spans), model=published.model
    )
    plans = [replace(plan, arrivals=law, seed=seed + n) for n, law in enumerate(arrivals)]
    rows, traces = [], []
    for plan in plans:
        with show.waiting(f"simulate {name_of(plan)}"):
            traces.append(clock.simulate(taken, plan, settings, delay_s))
        rows.append({"rate": name_of(plan), **summarize(traces[-1])})
    if out:
        for plan, trace in zip(plans, traces, strict=True):
            trace.save(trace_file(out, name_of(plan) if len(plans) > 1 else ""))
    compared = clock.compared(traces[0], measured) if measured else []
    show.result({"basis": taken.basis, "rows": rows, "compared": compared, "speculation": prices})
    columns = ("rate", "requests", "requests_per_s", "output_tokens_per_s", *WAITS[1:])
    show.table(rows, [name for name in columns if name in rows[0] and "sent" not in name], f"by {taken.basis}")
    if prices:
        show.table(prices, tuple(prices[0]), f"drafts of {drafted} tokens pay above", filled=True)
    if compared:
        show.table(compared, ("figure", "simulated", "measured", "off_%"), "beside the measured trace")
    if out:
        draw(out, plans, rows, traces)


LONG = option.TokenSpans("1024", "256")


@app.command()
@option.grouped
def capacity(
    published: PublishedTimes,
    *,
    gpus: Annotated[str, typer.Option(help="N,M,...: GPUs of one node, by tensor parallelism.")] = "1",
    ttft: Annotated[float, typer.Option(help="Limit in ms.")] = 500.0,
    itl: Annotated[float, typer.Option(help="Limit in ms.")] = 30.0,
    percentile: Annotated[float, typer.Option(help="Which percentile the limits are for.")] = 99.0,
    chunk: Annotated[str, typer.Option(help="N,M,...: most tokens of prompts in a step.")] = "512,2048,8192",
    lengths: option.TokenSpans = LONG,
    num_prompts: int = 500,
    max_num_seqs: int = 256,
    seed: option.Seed = 0,
    json: option.Json = False,
) -> None:
    """How many requests a second a model serves within limits of TTFT and ITL, with which chunk, on how many GPUs."""
    from rooflab.bench.latency import capacity as capacities
    from rooflab.bench.latency.clock import ClockSettings
    from rooflab.bench.load.data import Data
    from rooflab.bench.load.load_run import Plan

    for name, value, most in (("percentile", percentile, 100.0), ("ttft", ttft, math.inf), ("itl", itl, math.inf)):
        if not 0 < value < most:
            raise ValueError(f"{name}: expected above 0 and below {most:g}, got {value:g}")
    plan = Plan(num_prompts=num_prompts, seed=seed, model=published.model, data=Data("random", *lengths.spans))
    counts, chunks = _each("gpus", gpus), _each("chunk", chunk)
    base, *_ = (published.kernels(count, lengths) for count in counts)
    limits = {"ttft": ttft, "itl": itl}
    with show.waiting(f"loads of {num_prompts} requests on the clock"):
        settings = ClockSettings(0, max_num_seqs=max_num_seqs)
        rows = capacities.capacities(base, plan, settings, limits, percentile, counts, chunks)
    show.result({"basis": base.basis, "limits": limits, "percentile": percentile, "rows": rows})
    columns = ("gpus", "prefill_chunk", "kv_tokens", "requests_per_s", "least", "most", "requests_per_s_per_gpu", "why")
    tokens = f"{lengths.input_len} + {lengths.output_len} tokens"
    title = f"{published.model}, {tokens}: p{percentile:g} of TTFT within {ttft:g} ms, of ITL {itl:g} ms"
    show.table(rows, columns, title, filled=True)
    served = [row for row in rows if row.get("requests_per_s")]
    if served:
        best = max(served, key=lambda row: row["requests_per_s_per_gpu"])
        basis = replace(base, gpus=best["gpus"]).basis
        show.line(f"most for each GPU: {best['gpus']} with chunks of {best['prefill_chunk']}; by {basis}")
    else:
        show.line(f"no rate is within these limits; by {base.basis}", "yellow")


def _each(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: expected numbers joined by commas, got {text!r}") from None

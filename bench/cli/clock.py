"""`simulate` and `capacity`: the engine's scheduler on a clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app
from rooflab.bench.cli.load import WAITS, _draw, _laws, _name, _span

if TYPE_CHECKING:
    from rooflab.bench.latency.clock import ClockSettings
    from rooflab.bench.latency.step_model import KernelTimes, StepModel

Model = Annotated[str, typer.Argument(help="A preset, or a Hugging Face config.json or its folder.")]
Gpu = Annotated[str, typer.Option("--gpu", help="A GPU by name.")]
HostMs = Annotated[float, typer.Option(help="The host's time in each step, which kernel times do not have.")]
Bounds = Annotated[bool, typer.Option("--bounds", help="By bounds, also where kernel times were published.")]
T = TypeVar("T")


@app.command()
def simulate(
    model: Model = "llama-3.1-8b",
    gpu: Gpu = "h100-sxm",
    gpus: Annotated[int, typer.Option(help="GPUs of one node, with tensor parallelism.")] = 1,
    steps: Annotated[Path | None, typer.Option(help="Take the time of steps from this trace of our server.")] = None,
    against: Annotated[Path | None, typer.Option(help="A measured trace to compare with.")] = None,
    dtype: option.WeightsDtype = "bf16",
    kv_dtype: option.KvDtype = "bf16",
    host_ms: HostMs = 0.0,
    bounds: Bounds = False,
    rate: option.Rate = None,
    sweep: option.Sweep = None,
    concurrency: option.Concurrency = None,
    num_prompts: int = 1000,
    data: option.Data = "random",
    input_len: option.Lengths = "128",
    output_len: option.Lengths = "64",
    num_kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="Pages of the KV cache; without it, by memory; with --steps, no limit.")
    ] = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    prefill_chunk: int | None = None,
    speculate: option.Speculate = None,
    num_speculative_tokens: option.NumSpeculative = 4,
    draft: option.Draft = None,
    acceptance: option.Acceptance = 0.5,
    seed: option.Seed = 0,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """TTFT, ITL and throughput of a load, by the engine's scheduler in simulated time: with published times of kernels,
    with bounds, or with measured steps; nothing is computed, and no GPU is needed."""
    from rooflab.bench.latency import clock, step_model
    from rooflab.bench.load.data import Data
    from rooflab.bench.load.metrics import summarize
    from rooflab.bench.load.results import trace_file
    from rooflab.bench.load.run import Plan
    from rooflab.bench.load.trace import load_trace

    settings = clock.ClockSettings(
        *(num_kv_blocks or 2**20, 16, max_num_seqs, max_num_batched_tokens, prefill_chunk), acceptance=acceptance,
        prefix_caching=data == "prefix", num_speculative_tokens=num_speculative_tokens if speculate else 0,
    )  # fmt: skip
    taken: step_model.StepModel
    delay_s = 0.0
    if steps:
        taken, delay_s = step_model.of_trace(load_trace(steps))
    else:
        taken = kernels(model, gpu, gpus, dtype, kv_dtype, host_ms, bounds)
        settings = settings if num_kv_blocks else _fitting(taken, settings)
        _within(taken, input_len, output_len)
    spans = *_span("input_len", input_len), *_span("output_len", output_len)
    taken, prices = _speculating(taken, speculate, num_speculative_tokens, draft, sum(spans) // 2)
    laws = _laws(rate, None, sweep, concurrency, "poisson", 1.0)
    if against and len(laws) > 1:
        raise ValueError("against: expected one rate, and no --sweep")
    measured = load_trace(against) if against else None
    asked = Data(data, _span("input_len", input_len), _span("output_len", output_len))
    plans = [
        Plan(
            arrivals=law, concurrency=concurrency or 1, num_prompts=num_prompts, data=asked, model=model, seed=seed + n
        )
        for n, law in enumerate(laws)
    ]
    rows, traces = [], []
    for plan in plans:
        with show.waiting(f"simulate {_name(plan)}"):
            traces.append(clock.simulate(taken, plan, settings, delay_s))
        rows.append({"rate": _name(plan), **summarize(traces[-1])})
    if out:
        for plan, trace in zip(plans, traces, strict=True):
            trace.save(trace_file(out, _name(plan) if len(plans) > 1 else ""))
    compared = clock.compared(traces[0], measured) if measured else []
    show.result({"basis": taken.basis, "rows": rows, "compared": compared, "speculation": prices})
    columns = ("rate", "requests", "requests_per_s", "output_tokens_per_s", *WAITS[1:])
    show.table(rows, [name for name in columns if name in rows[0] and "sent" not in name], f"by {taken.basis}")
    if prices:
        show.table(prices, tuple(prices[0]), f"drafts of {num_speculative_tokens} tokens pay above", filled=True)
    if compared:
        show.table(compared, ("figure", "simulated", "measured", "off_%"), "beside the measured trace")
    if out:
        _draw(out, plans, rows, traces)


@app.command()
def capacity(
    model: Model = "llama-3.1-8b",
    gpu: Gpu = "h100-sxm",
    gpus: Annotated[str, typer.Option(help="N,M,...: GPUs of one node, by tensor parallelism.")] = "1",
    ttft: Annotated[float, typer.Option(help="Limit in ms.")] = 500.0,
    itl: Annotated[float, typer.Option(help="Limit in ms.")] = 30.0,
    percentile: Annotated[float, typer.Option(help="Which percentile the limits are for.")] = 99.0,
    chunk: Annotated[str, typer.Option(help="N,M,...: most tokens of prompts in a step.")] = "512,2048,8192",
    dtype: option.WeightsDtype = "bf16",
    kv_dtype: option.KvDtype = "bf16",
    host_ms: HostMs = 0.0,
    bounds: Bounds = False,
    input_len: option.Lengths = "1024",
    output_len: option.Lengths = "256",
    num_prompts: int = 500,
    max_num_seqs: int = 256,
    seed: option.Seed = 0,
    json: option.Json = False,
) -> None:
    """How many requests a second a model serves within limits of TTFT and ITL, with which chunk, on how many GPUs."""
    from rooflab.bench.latency import capacity as capacities
    from rooflab.bench.latency.clock import ClockSettings
    from rooflab.bench.load.data import Data
    from rooflab.bench.load.run import Plan

    for name, value, most in (("percentile", percentile, 100.0), ("ttft", ttft, math.inf), ("itl", itl, math.inf)):
        if not 0 < value < most:
            raise ValueError(f"{name}: expected above 0 and below {most:g}, got {value:g}")
    plan = Plan(
        num_prompts=num_prompts, seed=seed, model=model,
        data=Data("random", _span("input_len", input_len), _span("output_len", output_len)),
    )  # fmt: skip
    counts, chunks = _each("gpus", gpus, int), _each("chunk", chunk, int)
    base, *_ = (kernels(model, gpu, count, dtype, kv_dtype, host_ms, bounds) for count in counts)
    _within(base, input_len, output_len)
    limits = {"ttft": ttft, "itl": itl}
    with show.waiting(f"loads of {num_prompts} requests on the clock"):
        settings = ClockSettings(0, max_num_seqs=max_num_seqs)
        rows = capacities.capacities(base, plan, settings, limits, percentile, counts, chunks)
    show.result({"basis": base.basis, "limits": limits, "percentile": percentile, "rows": rows})
    columns = ("gpus", "prefill_chunk", "kv_tokens", "requests_per_s", "least", "most", "requests_per_s_per_gpu", "why")
    title = f"{model}, {input_len} + {output_len} tokens: p{percentile:g} of TTFT within {ttft:g} ms, of ITL {itl:g} ms"
    show.table(rows, columns, title, filled=True)
    served = [row for row in rows if row.get("requests_per_s")]
    if served:
        best = max(served, key=lambda row: row["requests_per_s_per_gpu"])
        basis = replace(base, gpus=best["gpus"]).basis
        show.line(f"most for each GPU: {best['gpus']} with chunks of {best['prefill_chunk']}; by {basis}")
    else:
        show.line(f"no rate is within these limits; by {base.basis}", "yellow")


def kernels(model: str, gpu: str, gpus: int, dtype: str, kv_dtype: str, host_ms: float, bounds: bool) -> KernelTimes:
    """The kernel times that a command line names.  Raises `ValueError` on an unknown name and on a wrong number."""
    from rooflab.bench.latency.step_model import KernelTimes
    from rooflab.roofline.architecture import get_architecture
    from rooflab.roofline.device import resolve

    arch = get_architecture(model)
    device, note = resolve(gpu)
    show.note(note)
    return KernelTimes(arch, device, dtype, kv_dtype, gpus, host_ms, bounds=bounds)


def _speculating(
    steps: StepModel, kind: str | None, num_tokens: int, draft: str | None, context: int
) -> tuple[StepModel, list[dict[str, Any]]]:
    """The steps with their drafts, and the acceptance at which these break even, by the number of sequences."""
    if kind is None:
        return steps, []
    from rooflab.bench.latency.speculation import priced, speculative
    from rooflab.engine.speculate.drafter import Speculation

    model = speculative(Speculation(kind, num_tokens, draft, sized=True), steps)
    return model, [{"sequences": n, **priced(model, n, context, num_tokens)} for n in (1, 4, 16, 64, 256)]


def _within(model: KernelTimes, input_len: str, output_len: str) -> None:
    longest = sum(_span(name, text)[1] for name, text in (("input_len", input_len), ("output_len", output_len)))
    if longest > model.arch.max_position:
        most = f"{model.arch.max_position} tokens ({model.arch.name})"
        raise ValueError(f"input_len: expected with output_len at most {most}, got {longest}")


def _fitting(model: Any, settings: ClockSettings) -> ClockSettings:
    from rooflab.bench.latency.capacity import kv_blocks

    pages = kv_blocks(model, settings)
    if not pages:
        raise ValueError(f"gpus: expected room for the weights of {model.arch.name}, got {model.gpus}")
    return replace(settings, num_kv_blocks=pages)


def _each(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: expected numbers joined by commas, got {text!r}") from None

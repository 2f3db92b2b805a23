"""Defines the commands `estimate`, `doctor`, `generate` and `lab`.  Most of them use the inference engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.base.extras import need
from rooflab.bench.base.plain import Json
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for


@app.command()
@option.grouped
def estimate(
    *,
    model: Annotated[str, typer.Option(help="A preset, or a Hugging Face config.json or its folder.")],
    gpu: Annotated[str, typer.Option(help="A GPU by name, such as h100 or a100-40gb.")] = "h100",
    batch: int = 1,
    context: int = 8192,
    prompt: Annotated[int | None, typer.Option(help="Tokens to prefill; without it, the whole context.")] = None,
    dtype: option.WeightsDtype = "bf16",
    kv_dtype: option.KvDtype = "bf16",
    tensor_parallel: Annotated[int | None, typer.Option("--tp", help="GPUs; without it, the fewest that fit.")] = None,
    json: option.Json = False,
) -> None:
    """Estimate a model's memory on a GPU, and its lowest possible TTFT and ITL.  Nothing is measured."""
    from rooflab.roofline.architecture import get_architecture
    from rooflab.roofline.device import resolve
    from rooflab.roofline.llm import estimate as price

    device, gpu_note = resolve(gpu)
    model_estimate = price(get_architecture(model), device, batch, context, dtype, kv_dtype, prompt, tensor_parallel)
    show.note(gpu_note)
    show.result(model_estimate)
    show.pairs(model_estimate.rows())


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="smollm2-135m, a GGUF file, or a Hugging Face folder.")] = "smollm2-135m",
    compare: Annotated[bool, typer.Option(help="Beside transformers, which loads the model once more in fp32.")] = True,
    json: option.Json = False,
) -> None:
    """Show what the engine reads from a model, and compare it with transformers.  Exit status 11: a result differs."""
    need("engine")
    from rooflab.bench.engine.doctor import differences, understood

    rows = understood(model)
    show.table(rows, ("what", "understood"), model)
    with show.waiting("transformers"):
        found_differences = list(differences(model)) if compare else []
    if found_differences:
        show.table(found_differences, ("what", "of", "differ", "first"), "beside transformers")
    show.result({"understood": rows, "differences": found_differences})
    exit_for({"OK", *("INCORRECT" for row in found_differences if row["differ"])})


@dataclass(frozen=True)
class Generating(option.EngineOptions):
    """Options of the engine for the command `generate`."""

    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights; the prompt's bytes are its ids.")] = False
    interpret: Annotated[bool, typer.Option("--interpret", help="Allow Triton kernels on the CPU; no times.")] = False
    max_model_len: Annotated[int | None, typer.Option(help="Longest context; without it, the model's.")] = None
    enforce_eager: option.Eager = False
    pdl: Annotated[bool, typer.Option("--pdl", help="Kernels of a graph may start while the one before ends.")] = False


@app.command()
@option.grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    engine: Generating,
    drafts: option.Speculative,
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Do not put the prompt through the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    ignore_eos: bool = False,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Answer a prompt, and show the latencies TTFT and ITL and the tokens per second."""
    need("engine")
    from rooflab.bench.engine.runs import generate_one
    from rooflab.engine.llm import LLM, SamplingParams
    from rooflab.engine.load.tokenizer import check_text

    sampling_params = SamplingParams(max_tokens, temperature, top_k, top_p, min_p, engine.seed, ignore_eos)
    if not prompt:
        raise ValueError("prompt: expected at least one token, got an empty prompt")
    check_text(prompt)
    engine_options = engine.options() | asdict(drafts)
    with show.waiting("loading the model"):
        llm = LLM(**engine_options, max_num_seqs=1)
    result = generate_one(llm, prompt, sampling_params, raw, show=show.piece, out=out)
    show.result(result)
    show.line("\n")
    show.engine_summary(result)


@app.command()
def lab(
    smoke: Annotated[bool, typer.Option("--smoke", help="The same in short, for CI.")] = False,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Run the main parts of Rooflab on this machine: check, bench, roofline, and the engine on real prompts."""
    need("engine")
    from rooflab.bench.lab import run_lab

    show.beside_json()
    summary: dict[str, Json] = run_lab(out, smoke)
    show.result(summary)
    exit_for(set(summary["statuses"]))

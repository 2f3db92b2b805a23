"""`estimate`, `generate` and `lab`: the kernels composed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rooflab.bench import show
from rooflab.bench.calls.names import parse_swaps
from rooflab.bench.cli.app import DeviceOption, Json, OutOption, app, exit_for


@app.command()
def estimate(
    model: Annotated[str, typer.Option(help="A preset, or a Hugging Face config.json or its folder.")],
    gpu: Annotated[str, typer.Option(help="A GPU by name, such as h100 or a100-40gb.")] = "h100",
    batch: int = 1,
    context: int = 8192,
    prompt: Annotated[int | None, typer.Option(help="Tokens to prefill; without it, the whole context.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: bf16, fp16, fp8_e4m3 or fp32.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Dtype of the KV cache.")] = "bf16",
    tensor_parallel: Annotated[int | None, typer.Option("--tp", help="GPUs; without it, the fewest that fit.")] = None,
    json: Json = False,
) -> None:
    """What a model needs on a GPU, and the least TTFT and ITL there: bounds by arithmetic, nothing measured."""
    from rooflab.roofline.architecture import get_architecture
    from rooflab.roofline.device import resolve
    from rooflab.roofline.llm import estimate as price

    device, note = resolve(gpu)
    result = price(get_architecture(model), device, batch, context, dtype, kv_dtype, prompt, tensor_parallel)
    if note:
        show.note(note)
    if json:
        show.as_json(result)
    else:
        show.pairs(result.rows())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[str, typer.Option(help="smollm2-135m, a GGUF file, or a Hugging Face folder.")] = "smollm2-135m",
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights; the prompt's bytes are its ids.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Do not put the prompt through the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    swap: Annotated[list[str] | None, typer.Option(help="OP=KERNEL: use this kernel; repeatable.")] = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="Allow Triton kernels on the CPU; no times.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or, on a CPU, int8.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context; without it, the model's.")] = None,
    device: DeviceOption = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs: kernel by kernel.")] = False,
    pdl: Annotated[bool, typer.Option("--pdl", help="Kernels of a graph may start while the one before ends.")] = False,
    ignore_eos: bool = False,
    out: OutOption = None,
    json: Json = False,
) -> None:
    """Answer a prompt, and say how long it took: TTFT, ITL and tokens a second."""
    from rooflab.bench import commands
    from rooflab.engine.llm import LLM, SamplingParams
    from rooflab.engine.tokenizer import check_text

    params = SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos)
    if not prompt:
        raise ValueError("prompt: expected at least one token, got an empty prompt")
    check_text(prompt)
    swaps = parse_swaps(swap or [])
    with show.waiting("loading the model"):
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            dummy=dummy,
            swap=swaps,
            interpret=interpret,
            enforce_eager=enforce_eager,
            pdl=pdl,
            max_num_seqs=1,
            max_model_len=max_model_len,
            seed=seed,
        )
    result = commands.generate_one(llm, prompt, params, raw, show=(lambda text: None) if json else show.piece, out=out)
    if json:
        show.as_json(result)
        return
    show.line("\n")
    show.engine_summary(result)


@app.command()
def lab(
    smoke: Annotated[bool, typer.Option("--smoke", help="The same in short, for CI.")] = False,
    out: OutOption = None,
    json: Json = False,
) -> None:
    """The whole lab on this machine: check, bench, roofline, and an engine run on real prompts."""
    from rooflab.bench.lab import run_lab

    if json:
        show.only_json()
    summary: dict[str, Any] = run_lab(out, smoke)
    if json:
        show.as_json(summary)
    exit_for(set(summary["statuses"]))

"""The command line.  Every command that prints a table or a result takes `--json` with the same content."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rooflab.bench import show

EXIT_INCORRECT, EXIT_INVALID, EXIT_USAGE = 11, 13, 2

app = typer.Typer(
    name="rooflab",
    help="A lab for LLM-inference kernels: check them, time them, place them on the roofline, run them in an engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Op = Annotated[str | None, typer.Argument(help="An op, as `rooflab list` names it; all without one.")]
KernelOption = Annotated[
    list[str] | None, typer.Option("--kernel", help="A kernel's name, or a file that registers kernels; repeatable.")
]
SuiteOption = Annotated[list[str] | None, typer.Option("--suite", help="Suite of cases; repeatable.")]
CaseOption = Annotated[list[str] | None, typer.Option("--case", help="One case, as M=64,N=48,...; repeatable.")]
SchemeOption = Annotated[list[str] | None, typer.Option("--scheme", help="fp32, fp16 or bf16; repeatable.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for records and figures.", callback=lambda value: check_folder(value)),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU where there is one.")]


def check_folder(path: Path | None) -> Path | None:
    """`path` if it is a folder or can become one; asked before any work is done."""
    if path is not None:
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise ValueError(f"out: expected a folder, got {str(path)!r}, and {existing} is a file")
    return path


def run() -> None:
    """The command line; bad input gives one sentence and exit status 2."""
    try:
        app(prog_name="rooflab")  # ends with SystemExit
    except ValueError as error:
        show.error(f"rooflab: {error}")
    except OSError as error:
        show.error(f"rooflab: {error.filename}: {error.strerror}" if error.filename else f"rooflab: {error}")
    except MemoryError as error:
        show.error(f"rooflab: out of memory: {error}")
    raise SystemExit(EXIT_USAGE)


def exit_for(statuses: set[str]) -> None:
    """Ends with status 11 where a kernel failed, 13 where a reading cannot be true or nothing ran at all."""
    if statuses - {"OK", "UNSUPPORTED", "UNAVAILABLE", "INVALID"}:
        raise typer.Exit(EXIT_INCORRECT)
    if "INVALID" in statuses or "OK" not in statuses:
        raise typer.Exit(EXIT_INVALID)


@app.command("list")
def list_kernels(op: Op = None, json: Json = False) -> None:
    """Every kernel, and why it can or cannot run here."""
    from rooflab.bench.commands import kernel_rows

    rows = kernel_rows([op] if op else None)
    if json:
        show.as_json(rows)
        return
    show.table(rows, ("op", "name", "role", "backend", "available", "reason"))


@app.command()
def check(
    op: Op = None,
    kernel: KernelOption = None,
    suite: SuiteOption = None,
    case: CaseOption = None,
    scheme: SchemeOption = None,
    device: DeviceOption = None,
    seed: int = 0,
    out: OutOption = None,
    json: Json = False,
) -> None:
    """Check kernels against the fp64 oracle, planted inputs included.  Exit status 11 where one is wrong."""
    from rooflab.bench.commands import check_rows, count_checks, run_checks, summarize_checks
    from rooflab.bench.selection import Selection

    chosen = Selection.of(op, kernel, suite or ["smoke", "edge"], case, scheme, device, seed)
    with show.progress("check", count_checks(chosen)) as advance:
        results = run_checks(chosen, out, advance)
    rows = check_rows(results)
    wrong = [row for row in rows if row["status"] not in ("OK", "UNSUPPORTED", "UNAVAILABLE")]
    if json:
        show.as_json(rows)
    else:
        columns = ("op", "kernel", "role", "ok", "failed", "not run", "checked_by", "worst", "weak", "reason")
        show.table(summarize_checks(results), columns)
        for row in wrong:
            show.failure(row)
        show.line(
            f"{len(rows)} checks: {sum(row['status'] == 'OK' for row in rows)} right, {len(wrong)} wrong, "
            f"{sum(row['status'] in ('UNSUPPORTED', 'UNAVAILABLE') for row in rows)} could not run here"
        )
    exit_for({row["status"] for row in rows})


@app.command()
def bench(
    op: Op = None,
    kernel: KernelOption = None,
    suite: SuiteOption = None,
    case: CaseOption = None,
    scheme: SchemeOption = None,
    device: DeviceOption = None,
    seed: int = 0,
    budget_s: Annotated[float, typer.Option("--budget", help="Seconds for one kernel on one case.")] = 0.5,
    choose: Annotated[bool, typer.Option(help="Write kernels/<op>/choices.json from these records.")] = False,
    out: OutOption = None,
    json: Json = False,
) -> None:
    """Check and time kernels; records and roofline figures go to --out.  Exit status 11 or 13 where one failed."""
    from rooflab.bench.choose import write_choices
    from rooflab.bench.commands import count_benches, result_folder, run_benches
    from rooflab.bench.figures import bench_row, draw_records
    from rooflab.bench.selection import Selection

    if choose and kernel:
        raise ValueError("choose: expected all kernels of an op, got --kernel")
    chosen = Selection.of(op, kernel, suite or ["smollm2_135m"], case, scheme, device, seed)
    folder = out or result_folder()
    with show.progress("bench", count_benches(chosen)) as advance:
        records = run_benches(chosen, folder, budget_s, advance)
    figures = draw_records(records, folder)
    written = write_choices(records) if choose else []
    rows = [bench_row(record) for record in records]
    if json:
        paths = [str(path) for path in (*figures, *written)]
        show.as_json({"folder": str(folder), "files": paths, "rows": rows})
    else:
        show.bench_table(rows)
        show.line(f"records and figures: {folder}")
        show.line("".join(f"  {path.name}" for path in figures))
        if written:
            show.line(f"choices written for {len(written)} ops")
    exit_for({record.status for record in records})


@app.command()
def roofline(
    records: Annotated[
        Path | None, typer.Argument(help="Records (a file or folder) to draw; the newest local run without it.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Draw the bounds of a GPU that is not here instead.")] = None,
    op: Annotated[list[str] | None, typer.Option("--op", help="Only this op; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option("--case", help="Only this case; repeatable.")] = None,
    all_cases: Annotated[bool, typer.Option("--all", help="Every case; each op's largest without it.")] = False,
    suite: Annotated[str, typer.Option(help="With --gpu: whose largest case of each op.")] = "llama3_8b",
    scheme: Annotated[str, typer.Option(help="With --gpu: the dtypes.")] = "bf16",
    out: OutOption = None,
    json: Json = False,
) -> None:
    """Draw the roofline: of measured records, or of what a GPU could reach at best."""
    from rooflab.bench import commands, figures

    if gpu:
        if records or case:
            raise ValueError("gpu: expected no records and no --case with it, for nothing was measured there")
        points, ceilings, note = commands.gpu_bounds(gpu, suite, scheme, op or [])
        if note:
            show.note(note)
        paths = figures.draw(points, ceilings, out or commands.result_folder())
    else:
        found, folder = commands.newest_records(records)
        found = [record for record in found if (not op or record.op in op) and (not case or record.case_id in case)]
        if not (all_cases or case):
            found = figures.largest_cases(found)
        points, paths = figures.points_of(found), figures.draw_records(found, out or folder, all_cases=True)
    if not paths:
        raise ValueError("records: no bench record with a bound among them, so there is nothing to draw")
    if json:
        show.as_json({"figures": [str(path) for path in paths], "points": [asdict(point) for point in points]})
        return
    show.line(f"{len(points)} points, {sum(point.seconds is not None for point in points)} of them measured")
    for path in paths:
        show.line(f"  {path}")


@app.command()
def estimate(
    model: Annotated[str, typer.Option(help="A preset, or a Hugging Face config.json or its folder.")],
    gpu: Annotated[str, typer.Option(help="A GPU by name, such as h100 or a100-40gb.")] = "h100",
    batch: int = 1,
    context: int = 8192,
    prompt: Annotated[int | None, typer.Option(help="Tokens to prefill; the context without it.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bf16, fp16, fp8_e4m3, fp32.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache.")] = "bf16",
    tensor_parallel: Annotated[int | None, typer.Option("--tp", help="GPUs; the least that fit without it.")] = None,
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
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    swap: Annotated[list[str] | None, typer.Option(help="OP=KERNEL: use this kernel; repeatable.")] = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="Allow Triton kernels on the CPU; no times.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context; the model's without it.")] = None,
    device: DeviceOption = None,
    ignore_eos: bool = False,
    out: OutOption = None,
    json: Json = False,
) -> None:
    """Answer a prompt, and say how long it took: TTFT, ITL and tokens a second."""
    from rooflab.bench import commands
    from rooflab.engine.llm import LLM, SamplingParams

    params = SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos)
    if not prompt:
        raise ValueError("prompt: expected at least one token, got an empty prompt")
    swaps = commands.parse_swaps(swap or [])
    with show.waiting("loading the model"):
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            dummy=dummy,
            swap=swaps,
            interpret=interpret,
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

"""`ledger`, `whatif` and `capture`: where a step's time goes, what a kernel would change, what a program asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for
from rooflab.bench.cli.clock import kernels
from rooflab.bench.cli.names import parse_swaps
from rooflab.roofline.names import values_by_name

if TYPE_CHECKING:
    from rooflab.bench.latency.ledger import Ledger
    from rooflab.bench.latency.whatif import PhaseChange
    from rooflab.engine.llm import LLM
    from rooflab.roofline.steps import Kind

Gpu = Annotated[str | None, typer.Option("--gpu", help="Published kernel times of this GPU; else, measured here.")]
Engine = Annotated[str, typer.Argument(help="smollm2-135m, a GGUF file, a Hugging Face folder, or a preset.")]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the weights; without it, the engine's own, or bf16.")]
Batch = Annotated[int, typer.Option(help="Sequences that decode.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens of a sequence; of a prefill, of the prompt.")]
LEDGER = (
    "op", "site", "kernel", "calls", "shape", "MFLOP", "MB", "moved_MB", "bound_ms", "limiter", "ms", "share",
    "x_bound", "basis",
)  # fmt: skip
SPARE = 160
"""Tokens that a sequence may get beyond its context."""


@app.command()
def ledger(
    model: Engine = "smollm2-135m",
    dummy: option.Dummy = False,
    gpu: Gpu = None,
    gpus: Annotated[int, typer.Option(min=1)] = 1,
    batch: Batch = 1,
    context: Context = 256,
    prefill: Annotated[bool, typer.Option("--prefill", help="The step of a prompt, and not of decoding.")] = False,
    dtype: Dtype = None,
    kv_dtype: option.KvDtype = "bf16",
    swap: option.Swap = None,
    device: option.Device = None,
    enforce_eager: option.Eager = False,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """A step of the engine, op by op: shape, cost, bound, time and share, the host's time, and the residual.

    Measured on this machine, or with --gpu by published times of kernels.
    """
    from rooflab.bench.latency.ledger import measured
    from rooflab.bench.latency.records import ledger_record
    from rooflab.engine.llm import LLM

    kind: Kind = "prefill" if prefill else "decode"
    batch = 1 if prefill else batch
    if gpu:
        if swap:
            raise ValueError("swap: expected no --gpu with it, whose kernels are others'")
        found = _published(model, gpu, gpus, dtype, kv_dtype, kind, batch, context)
    else:
        options = _options(model, dummy, dtype, device, batch, context) | {"swap": parse_swaps(swap or [])}
        with show.waiting("loading the model"):
            llm = LLM(**options, enforce_eager=enforce_eager)
        with show.waiting("steps of the engine"):
            found = measured(llm, kind, batch, context)
    if out:
        show.note(f"record: {ledger_record(found, out)}")
    rows = found.table()
    numbers = {"step_ms": found.step_ms, "itl_ms": found.itl_ms, "residual": found.residual, "noise": found.noise}
    show.result({**numbers, "rows": rows})
    title = f"{found.model} in {found.dtype} on {found.device}: {kind} of {batch} x {context} tokens"
    show.table(rows, LEDGER, title, filled=True)
    if found.noise:
        show.line(f"NOISY: {found.noise}", "yellow")
    exit_for({"NOISY" if found.noise else "OK"})


@app.command()
def whatif(
    model: Engine = "smollm2-135m",
    dummy: option.Dummy = False,
    kernel: Annotated[list[str] | None, typer.Option(help="OP=0.9x: assume 0.9 of its time; repeatable.")] = None,
    swap: Annotated[list[str] | None, typer.Option(help="OP=KERNEL: predicted and measured; repeatable.")] = None,
    gpu: Gpu = None,
    gpus: Annotated[int, typer.Option(min=1)] = 1,
    batch: Batch = 1,
    context: Context = 256,
    dtype: Dtype = None,
    kv_dtype: option.KvDtype = "bf16",
    device: option.Device = None,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Predict how another kernel changes TTFT and ITL; measure it too if it exists.

    TTFT is the step of one prompt of --context tokens; ITL is a decode step of --batch such sequences; both
    without CUDA graphs.
    """
    from rooflab.bench.latency import whatif as changes
    from rooflab.bench.latency.ledger import measured
    from rooflab.bench.latency.records import change_records
    from rooflab.engine.llm import LLM
    from rooflab.engine.probes import FUSED, OPS

    factors, swaps = _factors(kernel or []), parse_swaps(swap or [])
    if not factors and not swaps or gpu and swaps:
        raise ValueError("kernel: expected --kernel OP=0.9x, or --swap OP=KERNEL on this machine")
    known, used = (*OPS, FUSED, "gelu_and_mul", "gemm_w8a16"), set[str]()
    for op in () if gpu else {*factors, *swaps} - {*known}:
        raise ValueError(f"{'swap' if op in swaps else 'kernel'}: the engine uses {', '.join(known)}, got {op!r}")
    options = _options(model, dummy, dtype, device, batch, context)
    options |= {"enforce_eager": bool(swaps)}  # some of torch's kernels wait for the device, which no graph can keep
    kinds: tuple[tuple[Kind, int], ...] = (("prefill", 1), ("decode", batch))
    found: list[changes.PhaseChange | None] = []
    with show.waiting("loading the model"):
        llm = None if gpu else LLM(**options)
    for kind, own in kinds if factors else ():
        with show.waiting(f"a step of {kind}"):
            if llm is None:
                step = _published(model, gpu or "", gpus, dtype, kv_dtype, kind, own, context)
            else:
                step = measured(llm, kind, own, context)
        used |= {row.op for row in step.rows}
        found += changes.scale(step, factors)
    for op, name in swaps.items():
        assert llm is not None, "asked of this machine"
        used |= {choice.op for choice in llm.ops.choices}
        found += _swapped(llm, options, op, name, kinds, context)
    told = [change for change in found if change is not None]
    if missing := {*factors, *swaps} - {change.op for change in told}:
        raise ValueError(f"kernel: the steps use {', '.join(sorted(used))}, got {', '.join(sorted(missing))}")
    if out:
        about = {"model": model, "batch": batch, "context": context, "of": gpu or (llm.device.type if llm else "")}
        show.note(f"records: {change_records(told, about, out)}")
    _show_changes(told)


def _swapped(
    llm: LLM, options: dict[str, Any], op: str, name: str, kinds: tuple[tuple[Kind, int], ...], context: int
) -> list[PhaseChange | None]:
    from rooflab.bench.latency import whatif as changes
    from rooflab.engine.llm import LLM
    from rooflab.engine.ops import resolve
    from rooflab.engine.probes import PRODUCTS
    from rooflab.kernels.registry import get_kernel

    asked, other = get_kernel(op, name), None
    runs = {kind: changes.running(llm, op, kind, own, context) for kind, own in kinds}
    rest = [(kind, own) for kind, own in kinds if runs[kind] not in (asked, None)]
    same = f"swap: the engine runs {op}={name} already" if asked in runs.values() else ""
    if not rest:
        used = dict.fromkeys(choice.op for choice in llm.ops.choices)
        raise ValueError(same or f"swap: the engine uses {', '.join(used)}, got {op!r}")
    show.note(same and f"{same}, but for steps of {rest[0][0]}")
    with show.waiting(f"loading the model with {op}={name}"):
        if llm.device.type == "cpu" and op not in PRODUCTS:
            resolve(llm.limits, {op: name})  # an engine's own word on whether it could
        else:
            other = LLM(**options, swap={op: name})
    found = []
    for kind, own in rest:
        with show.waiting(f"{op}={name}, steps of {kind}"):
            found.append(changes.swap(llm, op, asked, kind, own, context, other))
    return found


def _show_changes(found: list[PhaseChange]) -> None:
    rows = [change.row() for change in found]
    show.result({"rows": rows, "verdicts": [change.verdict() for change in found]})
    show.table(rows, rows[0], filled=True)
    for change in found:
        show.line(change.verdict(), "yellow" if change.noise else None)
    exit_for({"NOISY" if change.noise else "OK" for change in found})


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def capture(
    context: typer.Context,
    suite: Annotated[Path, option.file("--suite", help="The file to write, called .json.")] = Path("captured.json"),
) -> None:
    """Run a Python program (after --), and keep the shapes of its ops, weighted by time, as a suite.

    rooflab capture --suite mine.json -- python app.py; then rooflab bench --suite mine.json, and ab and tune alike.
    """
    import json

    from rooflab.bench.latency.capture import run_program
    from rooflab.kernels._files import write_whole

    if suite.suffix != ".json":
        raise ValueError(f"suite: expected a file called .json, got {str(suite)!r}")
    captured = run_program(context.args)
    content = captured.suite(" ".join(context.args))
    if not content["ops"]:
        raise ValueError("program: expected calls of what our ops compute, as in torch's products, got none")
    write_whole(suite, json.dumps(content, indent=1, allow_nan=False) + "\n")
    rows = [
        {"op": op, "cases": len(own), **{key: sum(row[key] for row in own) for key in ("calls", "share")}}
        for op, own in content["ops"].items()
    ]
    show.table(sorted(rows, key=lambda row: -row["share"]), ("op", "cases", "calls", "share"))
    show.line(f"{captured.explained:.0%} of {captured.model.total_s:.3g} s in operators are in {suite}")


def _options(
    model: str, dummy: bool, dtype: str | None, device: str | None, batch: int, context: int
) -> dict[str, Any]:
    """Of an engine for such steps; tokens are read in their own step, so that its time is that of one step."""
    return {
        "model": model, "dummy": dummy, "dtype": dtype, "device": device, "max_num_seqs": batch, "overlap": False,
        "max_num_batched_tokens": max(context, batch, 512), "prefix_caching": False,
        "num_kv_blocks": batch * (-(-(context + SPARE) // 16) + 1), "max_model_len": context + SPARE,
    }  # fmt: skip


def _published(
    model: str, gpu: str, gpus: int, dtype: str | None, kv_dtype: str, kind: Kind, batch: int, context: int
) -> Ledger:
    from rooflab.bench.latency.ledger import from_kernels

    return from_kernels(kernels(model, gpu, gpus, dtype or "bf16", kv_dtype, 0.0, False), kind, batch, context)


def _factors(texts: list[str]) -> dict[str, float]:
    def factor(op: str, value: str) -> float:
        found = float(value.removesuffix("x"))
        if not 0 <= found < 100:
            raise ValueError
        return found

    return values_by_name(texts, "kernel: expected OP=0.9x, each op once", factor)

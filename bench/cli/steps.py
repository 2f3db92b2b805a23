"""Defines the commands `ledger`, `whatif` and `capture`, which study the time of an engine step op by op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflab.bench import show
from rooflab.bench.base.plain import Json
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for
from rooflab.bench.cli.names import parse_swaps
from rooflab.bench.cli.simulate import PublishedTimes
from rooflab.roofline.names import values_by_name

if TYPE_CHECKING:
    from rooflab.bench.latency.ledger import Ledger
    from rooflab.bench.latency.whatif import PhaseChange
    from rooflab.engine.llm import LLM
    from rooflab.roofline.steps import StepKind

STEP_KINDS: tuple[StepKind, StepKind] = ("prefill", "decode")
MAX_NEW_TOKENS = 160
"""The number of tokens that a sequence may get beyond its context."""


@dataclass(frozen=True)
class StepOptions:
    """Options that describe one step of the engine, such as the batch size and the context length."""

    model: Annotated[str, typer.Argument(help="smollm2-135m, a GGUF file, a folder, or a preset.")] = "smollm2-135m"
    dummy: option.Dummy = False
    gpu: Annotated[str | None, typer.Option(help="Published kernel times of this GPU; else, measured here.")] = None
    gpus: Annotated[int, typer.Option(min=1)] = 1
    batch: Annotated[int, typer.Option(help="Sequences that decode.")] = 1
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence; of a prefill, of the prompt.")] = 256
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights; without it, the engine's, or bf16.")] = None
    kv_dtype: option.KvDtype = "bf16"
    device: option.Device = None
    out: option.Out = None

    def engine(self, loading: str = "loading the model", **options: Json) -> LLM:
        """Loads an engine for timing single steps.  Steps do not overlap, so each time belongs to one step."""
        from rooflab.engine.llm import LLM

        max_tokens = self.context + MAX_NEW_TOKENS
        with show.waiting(loading):
            return LLM(
                self.model,
                dummy=self.dummy,
                dtype=self.dtype,
                device=self.device,
                max_num_seqs=self.batch,
                max_num_batched_tokens=max(self.context, self.batch, 512),
                prefix_caching=False,
                overlap=False,
                num_kv_blocks=self.batch * (-(-max_tokens // 16) + 1),
                max_model_len=max_tokens,
                **options,
            )

    def sequences(self, kind: StepKind) -> int:
        """Returns the number of sequences in a step: `batch`, or 1 for a prefill, which takes one prompt."""
        return 1 if kind == "prefill" else self.batch

    def ledger(self, kind: StepKind, llm: LLM | None) -> Ledger:
        """Returns a step's time by op: measured on `llm`, or calculated from published times if `llm` is None."""
        from rooflab.bench.latency.ledger import from_kernels, measured

        if llm is not None:
            with show.waiting(f"steps of {kind}"):
                return measured(llm, kind, self.sequences(kind), self.context)
        model = PublishedTimes(self.model, str(self.gpu), self.dtype or "bf16", self.kv_dtype).kernels(self.gpus)
        return from_kernels(model, kind, self.sequences(kind), self.context)


@app.command()
@option.grouped
def ledger(
    step: StepOptions,
    *,
    prefill: Annotated[bool, typer.Option("--prefill", help="The step of a prompt, and not of decoding.")] = False,
    swap: option.Swap = None,
    enforce_eager: option.Eager = False,
    json: option.Json = False,
) -> None:
    """Split an engine step's time by op, with shape, cost, bound and share; then show the step's other parts and sums.

    The times are measured on this machine.  With --gpu they come from published kernel times."""
    from rooflab.bench.latency.latency_records import ledger_record

    step_kind: StepKind = "prefill" if prefill else "decode"
    step = replace(step, batch=step.sequences(step_kind))
    if step.gpu and swap:
        raise ValueError("swap: expected no --gpu with it, whose kernels are others'")
    llm = None if step.gpu else step.engine(swap=parse_swaps(swap or []), enforce_eager=enforce_eager)
    ops = step.ledger(step_kind, llm)
    if step.out:
        show.note(f"record: {ledger_record(ops, step.out)}")
    rows = ops.table()
    show.result({**{name: getattr(ops, name) for name in ("step_ms", "itl_ms", "residual", "noise")}, "rows": rows})
    ledger_title = f"{ops.model} in {ops.dtype} on {ops.device}: {step_kind} of {step.batch} x {step.context} tokens"
    show.table(rows, rows[0], ledger_title, filled=True)
    if ops.noise:
        show.line(f"NOISY: {ops.noise}", "yellow")
    exit_for({"NOISY" if ops.noise else "OK"})


@app.command()
@option.grouped
def whatif(
    step: StepOptions,
    *,
    kernel: Annotated[list[str] | None, typer.Option(help="OP=0.9x: assume 0.9 of its time; repeatable.")] = None,
    swap: Annotated[list[str] | None, typer.Option(help="OP=KERNEL: predicted and measured; repeatable.")] = None,
    json: option.Json = False,
) -> None:
    """Predict how another kernel changes TTFT and ITL.  With --swap, also measure the change with an existing kernel.

    TTFT is one step with a prompt of --context tokens.  ITL is a decode step with --batch sequences of that length."""
    from rooflab.bench.latency.latency_records import change_records
    from rooflab.bench.latency.whatif import scale
    from rooflab.engine.choose.model_shapes import FUSED_OP, MATMUL_OPS, MODEL_OPS
    from rooflab.kernels.registry import get_kernel

    time_factors, swaps = _factors(kernel or []), parse_swaps(swap or [])
    if (not time_factors and not swaps) or (step.gpu and swaps):
        raise ValueError("kernel: expected --kernel OP=0.9x, or --swap OP=KERNEL on this machine")
    known_ops = (*MODEL_OPS, FUSED_OP, "gelu_and_mul", *MATMUL_OPS[1:])
    for op in () if step.gpu else {*time_factors, *swaps} - {*known_ops}:
        raise ValueError(f"{'swap' if op in swaps else 'kernel'}: the engine uses {', '.join(known_ops)}, got {op!r}")
    # Both engines run alike: a replayed step on a CPU has only C++ kernels, and some of torch's kernels wait for a GPU,
    # which a graph cannot capture.
    eager = any(get_kernel(op, name).backend != "cpp" for op, name in swaps.items())
    llm = None if step.gpu else step.engine(enforce_eager=eager)
    ledgers = [step.ledger(step_kind, llm) for step_kind in STEP_KINDS if time_factors]
    time_changes = [time_change for step_ledger in ledgers for time_change in scale(step_ledger, time_factors)]
    if missing_ops := time_factors.keys() - {time_change.op for time_change in time_changes}:
        used_ops = sorted({row.op for step_ledger in ledgers for row in step_ledger.rows})
        raise ValueError(f"kernel: the steps use {', '.join(used_ops)}, got {', '.join(sorted(missing_ops))}")
    if llm is not None:
        for op, name in swaps.items():
            time_changes += _swapped(step, llm, op, name, eager)
    if step.out:
        device_name = step.gpu or (llm.device.type if llm else "")
        step_fields = {"model": step.model, "batch": step.batch, "context": step.context, "of": device_name}
        show.note(f"records: {change_records(time_changes, step_fields, step.out)}")
    rows = [time_change.row() for time_change in time_changes]
    show.result({"rows": rows, "verdicts": [time_change.verdict() for time_change in time_changes]})
    show.table(rows, rows[0], filled=True)
    for time_change in time_changes:
        show.line(time_change.verdict(), "yellow" if time_change.noise else None)
    exit_for({"NOISY" if time_change.noise else "OK" for time_change in time_changes})


def _swapped(step: StepOptions, llm: LLM, op: str, name: str, eager: bool) -> list[PhaseChange]:
    from rooflab.bench.latency import whatif as changes
    from rooflab.bench.latency.ledger import chosen
    from rooflab.kernels.registry import get_kernel

    kernel = get_kernel(op, name)
    current_kernels = {kind: chosen(llm, kind, step.sequences(kind), step.context).get(op) for kind in STEP_KINDS}
    kinds = [kind for kind in STEP_KINDS if current_kernels[kind] not in (kernel, None)]
    no_change_note = f"swap: the engine runs {op}={name} already" if kernel in current_kernels.values() else ""
    if not kinds:
        raise ValueError(no_change_note or f"swap: expected an op of {llm.arch.name}, got {op!r}")
    show.note(no_change_note and f"{no_change_note}, but for steps of {kinds[0]}")
    swapped_llm = step.engine(f"loading the model with {op}={name}", enforce_eager=eager, swap={op: name})
    with show.waiting(f"{op}={name}"):
        swaps = [changes.swap(llm, swapped_llm, op, kernel, kind, step.sequences(kind), step.context) for kind in kinds]
    return [kernel_swap for kernel_swap in swaps if kernel_swap is not None]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def capture(
    context: typer.Context,
    suite: Annotated[Path, option.file("--suite", help="The file to write, called .json.")] = Path("captured.json"),
) -> None:
    """Run a Python program (after --), and store the shapes of its ops, weighted by time, as a suite of input cases.

    First: rooflab capture --suite mine.json -- python app.py.  Then: rooflab bench --suite mine.json (or ab, tune)."""
    import json

    from rooflab.bench.latency.captured_suite import run_program
    from rooflab.kernels._files import write_whole

    if suite.suffix != ".json":
        raise ValueError(f"suite: expected a file called .json, got {str(suite)!r}")
    call_profile = run_program(context.args)
    suite_content = call_profile.suite(" ".join(context.args))
    if not suite_content["ops"]:
        raise ValueError("program: expected calls of what our ops compute, as in torch's products, got none")
    write_whole(suite, json.dumps(suite_content, indent=1, allow_nan=False) + "\n")
    rows = []
    for op, cases in suite_content["ops"].items():
        call_count, time_share = (sum(case[name] for case in cases) for name in ("calls", "share"))
        rows.append({"op": op, "cases": len(cases), "calls": call_count, "share": time_share})
    show.table(sorted(rows, key=lambda row: -row["share"]), ("op", "cases", "calls", "share"))
    show.line(f"{call_profile.explained:.0%} of {call_profile.model.total_s:.3g} s in operators are in {suite}")


def _factors(texts: list[str]) -> dict[str, float]:
    def factor(op: str, value: str) -> float:
        time_factor = float(value.removesuffix("x"))
        if not 0 <= time_factor < 100:
            raise ValueError
        return time_factor

    return values_by_name(texts, "kernel: expected OP=0.9x, each op once", factor)

"""Defines the commands `emulate`, which runs compiled GPU code on the CPU, and `golden`, which tests the emulator."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rooflab.bench import show
from rooflab.bench.base.plain import JsonObject
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.cli import option
from rooflab.bench.cli.app import Command, app, exit_for
from rooflab.bench.compile.demangle import demangled
from rooflab.roofline.numbers import counted

if TYPE_CHECKING:
    from rooflab.bench.compile.cases import KernelCase

MB = 1e6
SHOWN_LINES = 64
"""The most lines that are shown of what kernels printed."""
PROGRAM = "program"
"""The key of the command's context under which the words of a program stand."""


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line at the first `--`, if `pytest` or `python` follows it.  Returns the words before it, and
    the program; without such a program, returns all words and an empty list."""
    for place, word in enumerate(words[:-1]):
        if word == "--":
            next_word = words[place + 1]
            if re.fullmatch(r"pytest|python(3(\.\d+)?)?", next_word):
                return list(words[:place]), list(words[place + 1 :])
            break
    return list(words), []


class _Emulate(Command):
    """The command `emulate`, which leaves a program behind `--` as it is."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Reads the words before the program."""
        own_words, ctx.meta[PROGRAM] = _split(args)
        return super().parse_args(ctx, own_words)


@app.command(cls=_Emulate)
def emulate(
    context: typer.Context,
    op: Annotated[str | None, typer.Argument(help="An op, or path.py::function; --kernel FILE needs none.")] = None,
    kernel: Annotated[
        str | None, typer.Argument(help="A kernel with compiled code; without one, all kernels of the op.")
    ] = None,
    kernels: option.Kernel = None,
    case: option.Case = None,
    scheme: option.Scheme = None,
    config: Annotated[str | None, typer.Option(help="A config of a tunable kernel, as block_m=64,...")] = None,
    reference: Annotated[str | None, typer.Option(help="With path.py::function: its oracle, path.py::name.")] = None,
    argument: option.Argument = "",
    dtype: option.ArgumentDtype = "",
    inputs: option.Inputs = None,
    ctas: Annotated[
        int | None, typer.Option("--ctas", help="Run only the first CTA, the last CTA and N others, drawn at random.")
    ] = None,
    schedule: Annotated[int, typer.Option(help="Order of warps and copies: 0, or a seed of another order.")] = 0,
    races: Annotated[bool, typer.Option(help="Look for races.")] = True,
    views: Annotated[
        bool, typer.Option("--views", help="Keep accesses among the elements of the views passed.")
    ] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Show source lines with their bytes and threads.")] = False,
    gpu: Annotated[str, typer.Option("--gpu", help="The Hopper GPU for which a time is predicted.")] = "h100",
    triton: Annotated[str, typer.Option(help="Compare these versions of Triton, as 3.6.0,3.9.0.")] = "",
    seed: option.Seed = 0,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Run compiled GPU code (sm_90a) on the CPU; show errors, races, bytes by memory level, counts by source line.

    OP is an op, or path.py::function: a Python function, of any project, that launches Triton kernels.  For such a
    function, --shape gives the tensors, as x=64x96,weight=96:bf16, and --argument gives the other values;
    or --inputs names a function that makes all of them.

    After --, a program for a GPU runs with its kernels emulated: rooflab emulate -- pytest tests/ -k attention, or
    rooflab emulate -- python script.py.  Its own exit status stays, if it is not 0.

    Exit status 11: a value is wrong, there is a race, or the call would fail on a GPU.  With --triton, 10: a later
    version is worse than the first (wrong or other values, more findings, more spills)."""
    if context.meta[PROGRAM]:
        _run_program(context, races, schedule, views, json)
    from rooflab.bench.compile.launchers import selected
    from rooflab.bench.emulate import calls as emulated_calls

    op_args = {"kernel": kernel or kernels, "scheme": scheme, "out": out}
    launcher_options = {"reference": reference, "argument": argument, "dtype": dtype, "inputs": inputs}
    if launcher := option.launcher(op, op_args, launcher_options):
        if ctas is not None and reference:
            raise ValueError(f"ctas: expected no --reference, for CTAs that do not run write nothing, got {ctas}")
        kernel_cases = [selected(launcher, case, argument, dtype, inputs)]
    else:
        kernel_names = [*([kernel] if kernel else []), *(kernels or [])]
        kernel_cases = emulated_calls.choose(op, kernel_names, case or [], scheme or [], config)
    if triton:
        refused = {"ctas": ctas, "lines": lines, "views": views, "out": out, "config": launcher and config}
        _compare_toolchains(triton, kernel_cases, refused, seed, schedule, races, reference)
        return
    calls = []
    for kernel_case in kernel_cases:
        with show.waiting(kernel_case.label):
            configs = config if launcher else None
            settings = (seed, schedule, ctas, races, gpu)
            calls.append(emulated_calls.call(kernel_case, *settings, None, reference, configs, views))
        for finding in calls[-1].answer.get("findings", ()):
            finding.update(config=config or "", command=shlex.join(["rooflab", *sys.argv[1:]]))
    if out is not None:
        path = emulated_calls.write(calls, out, seed)
        show.note(f"records: {path}")
    show.result([call_result.to_dict() for call_result in calls])
    for call_result in calls:
        kernel_case = call_result.target
        title = launcher or f"{kernel_case.op}/{kernel_case.kernel}  {kernel_case.case.id}  {kernel_case.scheme.name}"
        _show(title, call_result.answer, call_result.prediction, lines)
    exit_for({call_result.answer["status"] for call_result in calls})


def _compare_toolchains(
    text: str,
    kernel_cases: Sequence[KernelCase],
    refused: Mapping[str, object],
    seed: int,
    schedule: int,
    races: bool,
    reference: str | None,
) -> None:
    from rooflab.bench.emulate import toolchains

    for name, value in refused.items():
        if value is not None and value is not False and value != "":
            raise ValueError(f"{name}: expected no --triton with it, got {value}")
    versions = toolchains.versions_of(text)
    for version in versions:
        with show.waiting(f"installing Triton {version}"):
            toolchains.folder_of(version)
    with show.waiting(f"Triton {', '.join(versions)}"):
        options = {"seed": seed, "schedule": schedule, "races": races, "reference": reference}
        comparisons = toolchains.compare(kernel_cases, versions, **options)
    show.result([comparison.to_json() for comparison in comparisons])
    for comparison in comparisons:
        show.table(comparison.table(), toolchains.COLUMNS, comparison.kernel, filled=True)
        for row in comparison.rows:
            for finding in row.findings:
                show.line(f"{row.triton}: {finding}", "red")
            for sentence in row.bad:
                show.line(f"{row.triton}: {sentence}", "red")
        others = "; ".join(f"{name} {version}" for name, version in comparison.first_other.items())
        show.line(f"first to differ from {versions[0]}: {others or 'none'}")
    if any(comparison.is_worse for comparison in comparisons):
        raise typer.Exit(ExitStatus.SLOWER)


def _run_program(context: typer.Context, races: bool, schedule: int, views: bool, json: bool) -> NoReturn:
    """Runs the program of the command line.  Raises `ValueError` on an option that only a call of a kernel has."""
    from rooflab.bench.emulate import strangers

    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name not in ("races", "schedule", "views", "json") and source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{name}: expected no value with a program after --, got {value!r}")
    report = strangers.run(context.meta[PROGRAM], races, schedule, views, out_of_the_way=json)
    show.result(report.to_dict())
    for text_line, style in report.lines():
        show.line(text_line, style)
    raise typer.Exit(report.exit_status)


def _show(title: str, answer: JsonObject, prediction: str, lines: bool) -> None:
    line_style = None if answer["status"] == "OK" else "red"
    reason_text = f": {demangled(answer['reason'])}" if answer["reason"] else ""
    show.line(f"{title}: {answer['status']}{reason_text}", line_style)
    for launch in answer["launches"]:
        _show_launch(launch)
        if lines:
            _show_lines(launch)
    _show_findings(answer.get("findings", ()), answer["reason"])
    printed_lines = answer.get("printed", ())
    for printed_line in printed_lines[:SHOWN_LINES]:
        show.line(f"printed: {demangled(printed_line)}")
    if len(printed_lines) > SHOWN_LINES:
        show.line(f"printed: {counted(len(printed_lines) - SHOWN_LINES, 'more line')}, which --json shows")
    if answer["launches"]:
        ctas_text = f"{answer['ran']} of " * (answer["ran"] < answer["of"]) + counted(answer["of"], "CTA")
        checked_elements = answer.get("checked_elements")
        summary_text = f"{ctas_text} in {answer['seconds']:.2f} s, compilation included"
        summary_text += f"; {counted(checked_elements, 'element')} compared" if checked_elements is not None else ""
        show.line(summary_text)
    if prediction:
        show.line(prediction)


def _show_findings(findings: Sequence[JsonObject], reason: str) -> None:
    """Shows faults, except one that `reason` has shown.  Then says what their rules mean, once for each rule."""
    for finding in findings:
        if finding["text"] not in reason:
            sentence = f"{finding['severity']} [{finding['rule']}]: {finding['kernel']}: {finding['text']}"
            show.line(sentence, "red" if finding["severity"] == "error" else "yellow")
        if finding["missing"]:
            show.line(f"{finding['missing']} belongs {finding['belongs']}")
    for rule, finding in {finding["rule"]: finding for finding in findings}.items():
        section = f" (PTX ISA: {finding['section']})" if finding["section"] else ""
        show.line(f"{rule}: {finding['meaning']}{section}")


def _show_launch(launch: JsonObject) -> None:
    from rooflab.bench.emulate.calls import level_rows

    table_rows = [
        {"level": row["level"], "read_mb": row["read"] / MB, "written_mb": row["written"] / MB}
        for row in level_rows(launch["bytes"])
    ]
    title = f"{demangled(launch['kernel'])}, {counted(launch['ctas'], 'CTA')}"
    show.table(table_rows, ("level", "read_mb", "written_mb"), title)
    lines = []
    if launch["tensor_flops"]:
        lines.append(", ".join(f"{flops / 1e9:.4g} GFLOP {kind}" for kind, flops in launch["tensor_flops"].items()))
    least_count = launch["shared_wavefronts_least"]
    if least_count:
        lines.append(
            f"shared memory takes {launch['shared_wavefronts'] / least_count:.2f} times the turns without conflicts"
        )
    total = sum(launch["instructions"].values())
    top = list(launch["instructions"].items())[:6]
    lines.append(f"{total:,} thread instructions: " + ", ".join(f"{name} {count / total:.0%}" for name, count in top))
    for text_line in lines:
        show.line(text_line)


def _show_lines(launch: JsonObject) -> None:
    from rooflab.bench.emulate.calls import line_rows

    counts_by_file: dict[str, dict[int, Mapping[str, int]]] = {}
    for source_file, line_number, line_counts in launch["lines"]:
        counts_by_file.setdefault(source_file, {})[line_number] = line_counts
    for source_file, file_counts in counts_by_file.items():
        rows = list(line_rows(launch["sources"].get(source_file, []), file_counts))
        columns = ("line", "threads", "global_bytes", "shared_bytes", "conflicts", "source")
        show.table(rows, columns, Path(source_file).name if source_file else "no source line")


@app.command()
def golden(
    folder: Annotated[Path, typer.Argument(help="The folder of the golden files.")],
    write: Annotated[bool, typer.Option("--write", help="On a GPU: write the outputs that have no file yet.")] = False,
    device: option.Device = None,
    json: option.Json = False,
) -> None:
    """Compare the emulator's outputs with stored outputs of a GPU.  With --write, run on a GPU and store the outputs.

    Exit status 11: an output of the emulator differs by more than the tolerance of the op."""
    import torch

    from rooflab.bench.core import pick_device
    from rooflab.bench.emulate import golden as files

    if write:
        gpu_device = pick_device(device or "cuda")
        if gpu_device.type != "cuda":
            raise ValueError("device: golden outputs come from a GPU; expected cuda with --write, got cpu")
        file_names = files.write(folder, torch.device(gpu_device))
        show.result({"written": file_names})
        show.line(f"{counted(len(file_names), 'output')} in {folder}")
        return
    comparisons = files.compare(folder)
    rows = [asdict(comparison) for comparison in comparisons]
    show.result(rows)
    show.table(rows, ("target", "elements", "equal", "passed", "reason"))
    exit_for({"OK" if comparison.passed else "INCORRECT" for comparison in comparisons})

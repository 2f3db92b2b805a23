"""Defines the command `static`, which shows facts of compiled kernels, such as registers and spills, without a GPU."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for

if TYPE_CHECKING:
    from rooflab.bench.compile.cases import KernelCase, Query
    from rooflab.bench.compile.static_rows import CompileResult
    from rooflab.bench.compile.store import Store
    from rooflab.roofline.device import Device


@app.command()
def static(
    op: Annotated[str | None, typer.Argument(help="An op, or path.py::function; without one, all ops.")] = None,
    kernel: option.Kernel = None,
    suite: option.Suite = None,
    case: option.Case = None,
    scheme: option.Scheme = None,
    every_case: Annotated[
        bool, typer.Option("--all", help="Every case of the suite; without it, the case with the most work.")
    ] = False,
    argument: option.Argument = "",
    dtype: option.ArgumentDtype = "",
    inputs: option.Inputs = None,
    gpu: Annotated[str | None, typer.Option(help="The Hopper GPU for waves and tail; without it, an H100.")] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="REV", help="Compare with the compiled code of this git revision.")
    ] = None,
    markdown: Annotated[Path | None, option.file(help="With --compare: write the difference to this file.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compile again what was compiled before.")] = False,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Compile kernels without a GPU; show registers, spills, occupancy, tensor cores and options without effect.

    OP is an op, or path.py::function: a Python function, of any project, that launches kernels.  For such a function,
    --shape gives the tensors, as x=64x96,weight=96:bf16, and --argument gives the other values.

    Exit status 11: a kernel does not compile.  With --compare, new spills or lost tensor cores also give 11.  Exit
    status 13: a kernel no longer exists, or nothing was compiled."""
    from rooflab.bench.compile.cases import STATIC_SUITES, Query, device_for
    from rooflab.bench.compile.launchers import selected
    from rooflab.bench.compile.store import Store

    device = device_for(gpu)
    code_store = None if no_cache else Store()
    op_args = {"kernel": kernel, "suite": suite, "scheme": scheme, "all": every_case, "compare": compare}
    launcher = option.launcher(op, op_args, {"argument": argument, "dtype": dtype, "inputs": inputs})
    query = Query(
        op, tuple(kernel or ()), tuple(suite or STATIC_SUITES), tuple(case or ()), tuple(scheme or ()), every_case
    )
    if compare is None:
        if markdown:
            raise ValueError("markdown: expected --compare with it, for it holds a difference")
        kernel_cases = [selected(launcher, case, argument, dtype, inputs)] if launcher else query.select()
        results = _compile(kernel_cases, device, code_store)
        _report(results, code_store, out)
        exit_for({case_result.status for case_result in results})
        return
    if out:
        raise ValueError("compare: expected no --out with it, for it writes no records")
    raise typer.Exit(_compare(query, compare, device, code_store, markdown))


def _compile(chosen: list[KernelCase], device: Device, store: Store | None) -> list[CompileResult]:
    from rooflab.bench.compile.static_rows import compile_targets

    with show.progress("compile", len(chosen)) as progress_fn:
        results = compile_targets(chosen, device, store, progress_fn)
    if store:
        store.prune()
    return results


def _report(results: list[CompileResult], store: Store | None, out: Path | None) -> None:
    from rooflab.bench.compile import static_rows
    from rooflab.bench.compile.cases import ARCHITECTURE

    path = static_rows.write_records(results, out) if out else None
    summary_text, rows = static_rows.summary_line(results, store), [result.to_json() for result in results]
    show.result({"target": ARCHITECTURE, "summary": summary_text, "records": path, "results": rows})
    show.table(static_rows.rows(results), static_rows.COLUMNS, filled=True)
    for result in results:
        name = f"{result.target.op}/{result.target.kernel} {result.target.scheme.name}"
        if result.failure is not None:
            show.line(f"{result.status}: {result.failure}", "red" if result.status == "COMPILE_ERROR" else "dim")
        for launch in result.launches:
            for finding_text in launch.findings:
                show.line(f"{name}: {launch.name}: {finding_text}", "yellow")
    show.line(summary_text)
    if path:
        show.line(f"records: {path}")


def _compare(query: Query, revision: str, device: Device, store: Store | None, markdown: Path | None) -> int:
    """Compares compiled kernels between the working tree and a git revision.  Returns the exit status."""
    from rooflab.bench.compile import compiled_sides, difference
    from rooflab.kernels._files import write_whole

    files = [name for name in query.kernels if name.endswith(".py")]
    query = replace(query, kernels=tuple(name for name in query.kernels if name not in files))
    with ExitStack() as exit_stack:
        with show.waiting(f"reading this tree and {revision}"):
            base_tree, head_tree = exit_stack.enter_context(compiled_sides.two_sides(revision, files))
            item_pairs, has_unaffected = difference.reached(base_tree, head_tree, query, revision)
        code_changes = []
        if item_pairs:
            with show.progress("compile", sum(item is not None for pair in item_pairs for item in pair)) as progress_fn:
                code_changes = difference.compare_pairs(base_tree, head_tree, item_pairs, device, store, progress_fn)
    exit_code = difference.exit_status(code_changes, has_unaffected)
    summary_text = difference.summary_line(code_changes, base_tree.label, has_unaffected)
    if markdown:
        write_whole(markdown, difference.markdown(code_changes, base_tree.label, has_unaffected))
    rows = [change.to_json() for change in code_changes]
    show.result({"base": base_tree.label, "summary": summary_text, "exit_status": exit_code, "changes": rows})
    for change in code_changes:
        if change.verdict != "SAME":
            title = f"{change.verdict}: {change.op}/{change.kernel} {change.scheme} {change.case_id}"
            is_failure = change.verdict in difference.FAILING_VERDICTS or change.verdict == "GONE"
            show.line(title, "red" if is_failure else None)
            for sentence in change.sentences:
                show.line(f"  {sentence}")
    show.line(summary_text)
    return exit_code

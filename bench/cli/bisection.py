"""`bisect` and `bisect-step`: the commit that made a kernel slower."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.ab.bisection import ABORT, FOUND, UNRESOLVED, Question, current, step, subject
from rooflab.bench.ab.bisection import bisect as find
from rooflab.bench.cli.app import Json, app

OpName = Annotated[str, typer.Argument(help="An op, as `rooflab list` names it.")]
KernelName = Annotated[str | None, typer.Argument(help="A kernel of it; all without one.")]
Good = Annotated[str, typer.Option("--good", help="A revision that is fast, and is compared with at each step.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="One case, as M=64,N=48,...; repeatable.")]
Schemes = Annotated[list[str] | None, typer.Option("--scheme", help="fp32, fp16 or bf16; repeatable.")]
Threshold = Annotated[float | None, typer.Option(help="The A/B's: a smaller change is none.")]
Pairs = Annotated[int, typer.Option(help="Pairs of processes of one A/B; twice as many where it cannot tell.")]
Correctness = Annotated[bool, typer.Option("--correctness", help="A kernel that fails or is incorrect is bad.")]
Runner = Annotated[
    str | None,
    typer.Option(
        "--runner",
        help="Command in the place of `rooflab ab`, such as `rooflab ab --keep-environment`; gets the same arguments.",
    ),
]
Repo = Annotated[Path, typer.Option("--repo", help="The checkout.")]


@app.command()
def bisect(
    op: OpName,
    good: Good,
    bad: Annotated[str, typer.Option("--bad", help="A later revision that is slow.")],
    kernel: KernelName = None,
    case: Cases = None,
    scheme: Schemes = None,
    threshold: Threshold = None,
    pairs: Pairs = 12,
    correctness: Correctness = False,
    runner: Runner = None,
    repo: Repo = Path("."),
    json: Json = False,
) -> None:
    """Find the commit that made a kernel slower.  Exit status 0 where it is found, 12 where it cannot be told."""
    question = _question(op, kernel, case, scheme, threshold, pairs, correctness, runner)
    found = find(question, good, bad, repo, tell=show.note)
    lines = [subject(repo, commit) for commit in found.candidates]
    if json:
        tested = dict(found.tested)
        show.as_json({"first_bad": found.first_bad, "candidates": lines, "reason": found.reason, "tested": tested})
    elif found.first_bad:
        show.line(f"first bad commit: {lines[0]}")
    else:
        show.line(found.reason)
        for line in lines:
            show.line(f"  {line}")
    raise typer.Exit(FOUND if found.first_bad else UNRESOLVED)


@app.command("bisect-step")
def bisect_step(
    op: OpName,
    good: Good,
    kernel: KernelName = None,
    case: Cases = None,
    scheme: Schemes = None,
    threshold: Threshold = None,
    pairs: Pairs = 12,
    correctness: Correctness = False,
    runner: Runner = None,
    repo: Repo = Path("."),
) -> None:
    """One step, for `git bisect run rooflab bisect-step OP --good REV`: exit status 0 good, 1 bad, 125 cannot tell, 255
    end the bisection.

    Where the installed Rooflab is the checkout that git moves, each step runs that commit's own; `rooflab bisect` does
    not move anything.
    """
    try:
        head = current(repo)
        answer, why = step(_question(op, kernel, case, scheme, threshold, pairs, correctness, runner), good, head)
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        # To git a status up to 127 would be a bad commit, and one above it ends the bisection.
        show.error(f"rooflab: {error}")
        raise typer.Exit(ABORT) from error
    show.note(f"{head[:10]} {why}")
    raise typer.Exit(answer)


def _question(
    op: str,
    kernel: str | None,
    case: list[str] | None,
    scheme: list[str] | None,
    threshold: float | None,
    pairs: int,
    correctness: bool,
    runner: str | None,
) -> Question:
    command = {} if runner is None else {"command": tuple(shlex.split(runner))}
    return Question(op, kernel, tuple(case or ()), tuple(scheme or ()), threshold, pairs, correctness, **command)

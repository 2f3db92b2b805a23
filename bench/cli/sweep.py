"""`sweep`: a suite over the GPUs of a Ray cluster."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli.app import EXIT_INCORRECT, Json, app


@app.command()
def sweep(
    out: Annotated[Path, typer.Option("--out", help="Folder for the records, one folder a machine key.")],
    ray: Annotated[str | None, typer.Option("--ray", help="Address of the cluster; a local one without it.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="An op or a family; repeatable; all ops.")] = None,
    budget_s: Annotated[float, typer.Option("--budget", help="Seconds for each op on a GPU.")] = 480.0,
    workers: Annotated[int | None, typer.Option(help="How many; one for each GPU without it.")] = None,
    seed: int = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="On the CPUs of the cluster, with small shapes.")] = False,
    json: Json = False,
) -> None:
    """Run the suite over the GPUs of a Ray cluster, one worker a GPU; a lost worker's part is done by another.

    Rooflab must be installed on every node, from the same source. Exit status 11 where a part was not done, or a kernel
    is wrong.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError("ray: is not installed; pip install rooflab[fleet]")
    if not budget_s > 0:
        raise ValueError(f"budget: expected seconds above 0, got {budget_s}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers: expected at least 1, got {workers}")
    from rooflab.bench.suite.plan import make_plan
    from rooflab.bench.suite.sweep import sweep as run
    from rooflab.bench.suite.sweep_worker import Shard
    from rooflab.kernels import registry

    names = list(only or registry.ops())
    make_plan(names)  # names that are none are refused before anything is started
    shards = [Shard(name, budget_s, dry_run, seed) for name in names]
    state = run(ray, shards, out, workers, resume, show.note)
    rows = [{"part": name, **found} for name, found in sorted(state.shards.items())]
    if json:
        show.as_json(asdict(state) | {"complete": state.complete, "excluded": state.excluded})
    else:
        show.table(rows, ("part", "status", "attempts", "reason"))
        for kernel, reason in state.excluded.items():
            show.line(f"not run any more: {kernel}: {reason}", "red")
        show.line(f"{sum(row['status'] == 'DONE' for row in rows)} of {len(rows)} parts done; records: {out}")
    if not state.complete or state.excluded:
        raise typer.Exit(EXIT_INCORRECT)

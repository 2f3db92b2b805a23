"""Defines the command `watch`, which shows on a page what each save of a kernel's file changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, terminated_as_exception


@app.command()
def watch(
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="A Python file that registers a kernel.")],
    kernel: Annotated[str | None, typer.Option(help="Which kernel, if the file registers several.")] = None,
    case: Annotated[str | None, typer.Option(help="A case for counts, compiled code and time, as T=64,H=96.")] = None,
    gpu: Annotated[str, typer.Option(help="The Hopper GPU for which a time is predicted.")] = "h100",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free port.")] = 0,
    limit_s: Annotated[float, option.seconds("--limit", help="Seconds for a kernel on a small case.")] = 15.0,
) -> None:
    """Show a page that follows a file: at each save, counts by source line, a verdict, compiled code, times and a grid.

    The page is on this machine alone (127.0.0.1).  Ctrl-C ends it."""
    from rooflab.bench.watch.watch_runs import FileWatch
    from rooflab.bench.watch.watch_server import serving

    if not file.endswith(".py") or not Path(file).is_file():
        example = '@register(op="rmsnorm", name="mine", role="optimized", backend="triton")'
        raise ValueError(f"file: expected a Python file with {example} above a function, got {file!r}")
    watched = FileWatch(Path(file).absolute(), kernel=kernel, case=case, gpu=gpu, limit_s=limit_s)
    try:
        with terminated_as_exception(), serving(watched, port) as address:
            show.line(f"watching {file}: {address}   (Ctrl-C ends it)")
            watched.run()
    except KeyboardInterrupt:
        show.line("ended")

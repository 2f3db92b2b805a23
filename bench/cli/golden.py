"""`golden`: outputs of kernels on a GPU, and whether the emulator gives the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli.app import DeviceOption, Json, app, exit_for


@app.command()
def golden(
    folder: Annotated[Path, typer.Argument(help="Where the golden files are, or are to be.")],
    write: Annotated[bool, typer.Option("--write", help="On a GPU: keep the outputs that have no file yet.")] = False,
    device: DeviceOption = None,
    json: Json = False,
) -> None:
    """Hold the emulator to outputs that kernels gave on a GPU; with --write, keep such outputs.

    Exit status 11 where an emulated output differs by more than its op's tolerance.
    """
    import torch

    from rooflab.bench.calls.selection import pick_device
    from rooflab.bench.emulate import golden as files

    if write:
        place = pick_device(device or "cuda")
        if place.type != "cuda":
            raise ValueError("device: golden outputs come from a GPU; expected cuda with --write, got cpu")
        names = files.write(folder, torch.device(place))
        show.line(f"{len(names)} outputs in {folder}")
        return
    found = files.compare(folder)
    rows = files.rows(found)
    if json:
        show.as_json(rows)
    else:
        show.table(rows, ("target", "elements", "equal", "passed", "reason"))
    exit_for({"OK" if item.passed else "INCORRECT" for item in found})

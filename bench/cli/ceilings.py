"""`ceilings`: what this machine can reach."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for

NOT_SPENT = "budget: not spent, because what was measured before still counts; --refresh spends it"


@app.command()
def ceilings(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even where readings were kept.")] = False,
    budget_s: Annotated[
        float | None, option.seconds("--budget", help="Seconds of measuring; without it, 60 on a GPU and 5 on a CPU.")
    ] = None,
    device: option.Device = None,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Measure this machine's ceilings once, and show them beside the data sheet.  Exit status 11 or 13 on a bad one."""
    from rooflab.bench.core.select import pick_device

    chosen = pick_device(device)
    found = (_cpu if chosen.type == "cpu" else _cuda)(chosen, refresh, budget_s, out)
    show.result({name: value for name, value in found.items() if name != "columns"})
    kind = f"{found['used']} ceilings{': ' + found['reason'] if found['reason'] else ''}"
    show.line(f"Ceilings of {found['device']}, {found['measured_under']}", "bold")
    show.table(found["rows"], found["columns"])
    show.line(f"bounds use the {kind}")
    if found["file"]:
        show.line(f"records: {found['file']}")
    # A launch shape with an impossible reading is harmless where another shape's is possible; a wrong result never is.
    statuses = {row["status"] for row in found["rows"]}
    exit_for(statuses | {reading["status"] for reading in found["readings"] if reading["status"] != "INVALID"})


def _cpu(device: Any, refresh: bool, budget_s: float | None, out: Path | None) -> dict[str, Any]:
    from rooflab.bench.core.ceilings.ceilings import cpu_ceilings, kept_cpu_ceilings
    from rooflab.bench.core.ceilings.readings import cpu_records, cpu_rows
    from rooflab.bench.core.environment import snapshot
    from rooflab.bench.core.record import new_run_id

    if budget_s is not None and not refresh and kept_cpu_ceilings() is not None:
        show.note(NOT_SPENT)
    with show.waiting("measuring this CPU"):
        found = cpu_ceilings(refresh, 5.0 if budget_s is None else budget_s)
    environment = snapshot().to_dict()
    return {
        "device": found.device,
        "used": found.kind,
        "reason": found.noise and f"NOISY, and so not kept: {found.noise}",
        "measured_under": f"torch {environment['torch']}, {environment['threads']} threads",
        "rows": cpu_rows(found),
        "columns": ("limit", "measured", "unit", *(("status",) if found.noise else ())),
        "ceilings": asdict(found),
        "readings": [],
        "environment": environment,
        "file": _write(out, cpu_records(found, environment, new_run_id())),
    }


def _cuda(device: Any, refresh: bool, budget_s: float | None, out: Path | None) -> dict[str, Any]:
    import torch

    from rooflab.bench.core.ceilings.ceilings import CUDA_BUDGET_S, ceilings_for, cuda_ceilings, kept_ceilings
    from rooflab.bench.core.ceilings.cuda import GROUPS_OF_HOPPER
    from rooflab.bench.core.ceilings.readings import COLUMNS, card_records, card_rows
    from rooflab.bench.core.record import new_run_id
    from rooflab.roofline.device import identify

    kept, reason = kept_ceilings(device)
    if kept is None or refresh:
        show.note(f"measuring: {reason or 'asked for anew'}")
    elif budget_s is not None:
        show.note(NOT_SPENT)
    with show.progress("ceilings", GROUPS_OF_HOPPER) as advance:
        kept = cuda_ceilings(device, refresh, CUDA_BUDGET_S if budget_s is None else budget_s, advance=advance)
    name = torch.cuda.get_device_name(device)
    used = ceilings_for(device)
    return {
        "device": name,
        "used": used.kind if used else "no",
        "reason": kept.reason,
        "measured_under": f"driver {kept.environment['gpu']['driver']}, {kept.made}"
        + (", clocks set by the user" if kept.clocks_were_set else ""),
        "rows": card_rows(kept.readings, identify(name)),
        "columns": COLUMNS,
        "ceilings": None if kept.ceilings is None else asdict(kept.ceilings),
        "readings": [{**asdict(reading), "rate_per_s": reading.rate_per_s} for reading in kept.readings],
        "environment": kept.environment,
        "file": _write(out, card_records(kept.readings, kept.ceilings, kept.environment, new_run_id())),
    }


def _write(out: Path | None, records: list[Any]) -> str | None:
    """The file of records, where one was asked for."""
    from rooflab.bench.core.record_files import RunWriter

    if out is None:
        return None
    writer = RunWriter(out, records[0].run_id)
    writer.write(*records)
    return str(writer.path)

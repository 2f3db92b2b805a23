"""Defines the command `ceilings`, which measures the peak rates of this machine, such as bandwidth and FLOP/s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for

if TYPE_CHECKING:
    from rooflab.bench.core import Record

BUDGET_NOTE = "budget: not spent, because what was measured before still counts; --refresh spends it"


@app.command()
def ceilings(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if readings were kept.")] = False,
    budget_s: Annotated[
        float | None, option.seconds("--budget", help="Seconds of measuring; without it, 60 on a GPU, 5 on a CPU.")
    ] = None,
    device: option.Device = None,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Measure this machine's peak rates once; show them beside the data sheet.  Exit status 11: failure; 13: noise."""
    from rooflab.bench.core import MachineLimits, RunWriter, ceilings_for, pick_device

    chosen_device = pick_device(device)
    machine_limits = MachineLimits.kept(chosen_device)
    if machine_limits.records and not refresh:
        show.note(BUDGET_NOTE if budget_s is not None else None)
    else:
        show.note(f"measuring: {'asked for anew' if machine_limits.records else machine_limits.reason}")
        with show.waiting("measuring this machine"):
            machine_limits = MachineLimits.measured(chosen_device, budget_s)
    (records, reason), rows, peak_rates = machine_limits, machine_limits.rows, ceilings_for(chosen_device)
    noise = (records[0].ceilings or {}).get("noise")
    name, machine_conditions, column_names = _shown(records, list(rows[0]))
    rate_kind, reason = peak_rates.kind if peak_rates else "no", f"NOISY, and so not kept: {noise}" if noise else reason
    if writer := RunWriter(out) if out else None:
        writer.write(*(replace(record, run_id=writer.run_id) for record in records))
    json_result = {
        "device": name,
        "used": rate_kind,
        "reason": reason,
        "measured_under": machine_conditions,
        "rows": rows,
        "ceilings": records[0].ceilings,
        "readings": [asdict(replace(record, environment={}, ceilings=None)) for record in records],
        "environment": records[0].environment,
        "file": writer and writer.path,
    }
    show.result(json_result)
    show.line(f"Ceilings of {name}, {machine_conditions}", "bold")
    show.table(rows, column_names)
    show.line(f"bounds use the {rate_kind} ceilings{': ' + reason if reason else ''}")
    if writer:
        show.line(f"records: {writer.path}")
    # A launch shape with an impossible reading is harmless where another shape's is possible; a wrong result never is.
    exit_for({row["status"] for row in rows} | {record.status for record in records if record.status != "INVALID"})


def _shown(records: Sequence[Record], columns: list[str]) -> tuple[str, str, list[str]]:
    """Returns parts of the table of measured limits: the device's name, driver or torch version, and the columns."""
    environment, gpu = records[0].environment, records[0].environment["gpu"]
    if records[0].device == "cpu":
        columns = ["limit", "measured", "unit", *(["status"] if records[0].status == "NOISY" else [])]
        return environment["cpu"], f"torch {environment['torch']}, {environment['threads']} threads", columns
    throttle_names = {name for record in records for name in (record.clocks or {}).get("throttle_names", ())}
    user_clocks_note = ", clocks set by the user" if "clocks set by the user" in throttle_names else ""
    newest_time = max(record.timestamp for record in records)
    return gpu["name"], f"driver {gpu['driver']}, {newest_time}{user_clocks_note}", columns

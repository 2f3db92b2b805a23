"""Targets of the lab's own tools: wrong verdicts of the A/B on the card, and outputs for the emulator to reproduce."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from targets.commands import run_command
from targets.target import AcceptanceTarget

from rooflab.bench.suite.entries import BarStatus, Context, EntryOutcome
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole

REPEATS = 20
ROUND_S = 100.0
"""The seconds for an A/A round of the six kernels on a 2-core CPU; faster cores end a round earlier."""


def false_alarms(context: Context, arguments: Sequence[str], repeats: int, most: int) -> EntryOutcome:
    """Counts the wrong verdicts of a self-test: FASTER or SLOWER on identical code, SAME on slowed code.

    It has `repeats` rounds of identical code and one round of slowed code, which share the entry's time.
    """
    needed = f"at most {most} FASTER or SLOWER of identical code, no SAME of slowed code"
    words = [word.replace("{out}", str(context.out)) for word in arguments]
    words += ["--repeats", str(repeats), "--budget", str(max(1, int(context.seconds / (repeats + 1))))]
    status, value, errors = run_command(words)
    if not isinstance(value, dict) or "tables" not in value:
        return EntryOutcome("FAILED", f"exit status {status}: {errors[-300:]}", "UNMEASURED", needed)
    write_whole(context.out / "bar-ab.json", json.dumps(value, indent=1) + "\n")
    runs = [rows for title, rows in value["tables"].items() if "slowed" not in title]
    slowed = [row for title, rows in value["tables"].items() if "slowed" in title for row in rows]
    alarms = sum(row["verdict"] in ("FASTER", "SLOWER") for rows in runs for row in rows)
    missed = sum(row["verdict"] == "SAME" for row in slowed)
    unmeasured = sum(row["verdict"] in ("INVALID", "MISSING", "FAILED") for rows in [*runs, slowed] for row in rows)
    figures = {"comparisons": sum(map(len, runs)), "false alarms": alarms, "slowed and called SAME": missed}
    if unmeasured or not slowed:
        return EntryOutcome("DONE", f"{unmeasured} comparisons without a reading", "UNMEASURED", needed, figures)
    return EntryOutcome("DONE", "", "MET" if alarms <= most and not missed else "MISSED", needed, figures)


LEAST = 20


def golden(context: Context) -> EntryOutcome:
    """Stores the outputs of every kernel that may run on this card, and reports their number."""
    from rooflab.bench.emulate import golden as files

    needed = f"outputs of at least {LEAST} kernels and dtypes kept; the emulator is held to them afterwards"
    chosen = [target for target in files.targets() if f"{target.op}/{target.kernel}" not in registry.excluded()]
    names = files.write(context.out / "golden", torch.device(context.device), chosen)
    status: BarStatus = "MET" if len(names) >= LEAST else "MISSED"
    return EntryOutcome("DONE", "", status, needed, {"kept": len(names)})


TARGETS = (
    AcceptanceTarget(
        "bar:ab.false_alarms",
        "6 kernels x 20 A/A repeats: no more than 1 FASTER or SLOWER in all; an injected 5% slowdown is never SAME",
        false_alarms,
        {"arguments": "ab --self-test --inject 0.05 --out {out} --json".split(), "repeats": REPEATS, "most": 1},
        ROUND_S * (REPEATS + 1),
        20.0,
        on_cpu=False,
    ),
    AcceptanceTarget(
        "bar:emulator.golden",
        "outputs of at least 20 kernels and dtypes, which the emulator must reproduce",
        golden,
        {},
        60.0,
        73.5,
        checks=tuple(registry.ops()),
        on_cpu=False,
    ),
)

"""Bar of the emulator: outputs of kernels on the card, which it must reproduce."""

from __future__ import annotations

import torch

from rooflab.bench.suite.entries import BarStatus, Context, Entry, Outcome

LEAST = 20


def golden(context: Context) -> Outcome:
    """Keeps the outputs of every kernel that may run on this card, and says of how many."""
    from rooflab.bench.emulate import golden as files

    needed = f"outputs of at least {LEAST} kernels and dtypes kept; the emulator is held to them afterwards"
    if context.dry_run:
        return Outcome("UNSUPPORTED", "outputs of a CPU say nothing of the emulator", "UNMEASURED", needed)
    chosen = [target for target in files.targets() if f"{target.op}/{target.kernel}" not in context.excluded]
    names = files.write(context.out / "golden", torch.device(context.device), chosen)
    status: BarStatus = "MET" if len(names) >= LEAST else "MISSED"
    return Outcome("DONE", "", status, needed, {"kept": len(names)}, ("golden/golden.json",))


BARS = (
    Entry(
        "bar:emulator.golden",
        "outputs of at least 20 kernels and dtypes, which the emulator must reproduce",
        f"{__name__}:golden",
        cost_s=60.0,
        value=58.0,
        needs=("environment", "first"),
    ),
)

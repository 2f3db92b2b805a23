"""The server on the card, under load: latency against throughput, from one server of random weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from targets.commands import run_command
from targets.target import AcceptanceTarget

from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.engine.ops import FIRST_ON_CUDA


def serving(
    context: Context, model: str, rates: Sequence[float], num_prompts: int = 200, data: str = "sharegpt"
) -> EntryOutcome:
    """Serves `model`, and loads it at each of `rates` requests per second, with the lengths of `data`."""
    command = [sys.executable, "-m", "rooflab.bench", "serve", model, "--dummy", "--device", context.device]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = next((line.split()[0] for line in server.stdout or () if " answers" in line), "")
            if not url:
                return EntryOutcome("FAILED", f"the server of {model} ended with status {server.wait()}")
            sweep = ",".join(f"{rate:g}" for rate in rates)
            asked = ["--sweep", sweep, "--data", data, "--num-prompts", str(num_prompts), "--seed", "0"]
            status, value, errors = run_command(["load", "--url", url, *asked, "--out", str(context.out), "--json"])
        finally:
            server.terminate()
    loaded = isinstance(value, dict) and bool(value.get("files"))
    figures = {"exit status": status}
    return EntryOutcome("DONE" if loaded else "FAILED", " ".join(errors.split())[-500:], figures=figures)


TARGETS = (
    AcceptanceTarget(
        "serving:llama-3.1-8b",
        "latency against throughput of a server of Llama-3.1-8B with random weights",
        serving,
        {"model": "llama-3.1-8b", "rates": [1, 4, 16, 32]},
        288.0,
        49.0,
        checks=tuple(FIRST_ON_CUDA),
        on_cpu=False,
    ),
)

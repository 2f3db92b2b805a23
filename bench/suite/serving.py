"""The server on the card, under load: latency against throughput, from one server of random weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from rooflab.bench.suite.entries import Context, Outcome
from rooflab.bench.suite.tasks import run_command


def serving(
    context: Context, model: str, rates: Sequence[float], num_prompts: int = 200, data: str = "sharegpt"
) -> Outcome:
    """Serves `model` and loads it at each of `rates` requests a second, with `data`'s lengths."""
    if context.dry_run:
        return Outcome("UNSUPPORTED", "a server and its load take a minute; their tests hold them on a CPU")
    command = [sys.executable, "-m", "rooflab.bench", "serve", model, "--dummy", "--device", context.device]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = next((line.split()[0] for line in server.stdout or () if " answers" in line), "")
            if not url:
                return Outcome("FAILED", f"the server of {model} ended with status {server.wait()}")
            sweep = ",".join(f"{rate:g}" for rate in rates)
            asked = ["--sweep", sweep, "--data", data, "--num-prompts", str(num_prompts), "--seed", "0"]
            status, value, errors = run_command(["load", "--url", url, *asked, "--out", str(context.out), "--json"])
        finally:
            server.terminate()
    files = tuple(value["files"]) if isinstance(value, dict) and "files" in value else ()
    figures = {"exit status": status}
    return Outcome("DONE" if files else "FAILED", " ".join(errors.split())[-500:], figures=figures, files=files)

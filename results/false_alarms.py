"""How often the two gates say "slower" of identical code on a busy machine; writes `false_alarms.md` and `.json` here.

    python results/false_alarms.py --ab 24 --gate 36

Each run is a command of its own, as in a workflow: `rooflab ab --base HEAD` in this checkout, which must be without
changes, so that both sides are HEAD; and `pytest --benchmark` with `--benchmark-compare-fail` against a baseline that
the same machine kept while nothing else ran.  Beside the runs another process computes in bursts of 0.2 to 4 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rooflab.bench.base.plain import markdown_code, markdown_table
from rooflab.kernels._files import write_whole

HERE = Path(__file__).resolve().parent
AB = "ab rmsnorm softmax silu_and_mul rope --kernel library --pairs 5 --kernel-seconds 0.1".split()
TESTS = """
import pytest, torch

@pytest.mark.parametrize("rows", [1, 16, 256])
@pytest.mark.parametrize("fn", [torch.softmax, torch.cumsum], ids=["softmax", "cumsum"])
def test_rows(fn, rows, kernel_benchmark):
    kernel_benchmark(fn, torch.randn(rows, 1024), -1)
"""
BURSTS = """
import random, time
while True:
    end = time.perf_counter() + random.uniform(0.2, 4)
    while time.perf_counter() < end:
        sum(range(1000))
    time.sleep(random.uniform(0.2, 4))
"""


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="False alarms of ab and of --benchmark-compare-fail.")
    parser.add_argument("--ab", type=int, default=60, help="runs of `rooflab ab`, a minute each; 0 keeps the last ones")
    parser.add_argument("--gate", type=int, default=60, help="runs of pytest; 0 keeps the last ones")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    kept = HERE / "false_alarms.json"
    found = json.loads(kept.read_text()) if kept.is_file() else {}
    if given.gate:
        with tempfile.TemporaryDirectory() as scratch:
            baseline(Path(scratch))
            with bursts():
                found["compare-fail"] = gate(Path(scratch), given.gate)
    if given.ab:
        with bursts():
            found["ab"] = ab(given.ab)
    found["machine"] = {"cpu": cpu(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    write_whole(kept, json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_whole(kept.with_suffix(".md"), page(found))


@contextmanager
def bursts() -> Iterator[None]:
    """Another process that computes in bursts."""
    busy = subprocess.Popen([sys.executable, "-c", BURSTS])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def ab(runs: int) -> dict[str, Any]:
    """Verdicts of each run of `ab` on two equal trees."""
    command = [str(Path(sys.executable).with_name("rooflab")), *AB, "--base", "HEAD", "--json"]
    out = []
    for number in range(runs):
        began = time.perf_counter()
        done = subprocess.run([*command, "--seed", str(number)], cwd=HERE.parent, capture_output=True, text=True)
        rows = [row for table in json.loads(done.stdout)["tables"].values() for row in table]
        out.append({"status": done.returncode, "seconds": round(time.perf_counter() - began, 1), "verdicts": rows})
        print(number, done.returncode, Counter(row["verdict"] for row in rows), flush=True)
    return {"command": " ".join(["rooflab", *AB, "--base", "HEAD"]), "runs": [short(one) for one in out]}


def short(run: dict[str, Any]) -> dict[str, Any]:
    """A run without what no reader of the page asks for."""
    rows = [{name: row.get(name) for name in ("key", "verdict", "reason")} for row in run["verdicts"]]
    return {**run, "verdicts": rows}


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark"]


def baseline(folder: Path) -> None:
    """Keeps a baseline of the benchmarks."""
    (folder / "test_mine.py").write_text(TESTS)
    subprocess.run([*PYTEST, "--benchmark-save=base"], cwd=folder, check=True, capture_output=True)


def gate(folder: Path, runs: int) -> dict[str, Any]:
    """What each run of `pytest --benchmark` against the baseline ended with."""
    words = ["--benchmark-compare=0001", "--benchmark-compare-fail=median:10%"]
    out = []
    for number in range(runs):
        done = subprocess.run([*PYTEST, *words], cwd=folder, capture_output=True, text=True)
        text = done.stdout + done.stderr
        left_out = re.search(r"left out of --benchmark-compare-fail: (\d+)", text)
        alarms = re.findall(r"(?m)^\s*(.* has failed .*)$", text)
        out.append({"status": done.returncode, "noisy": int(left_out[1]) if left_out else 0, "alarms": alarms})
        print(number, out[-1], flush=True)
    return {"command": "pytest --benchmark " + " ".join(words), "benchmarks": 6, "runs": out}


def page(found: dict[str, Any]) -> str:
    """The page of what was found."""
    runs, gated, machine = found["ab"]["runs"], found["compare-fail"]["runs"], found["machine"]
    verdicts = Counter(row["verdict"] for run in runs for row in run["verdicts"])
    alarms = sum(bool(run["alarms"]) for run in gated)
    seconds = sorted(run["seconds"] for run in runs)[len(runs) // 2]
    readings = found["compare-fail"]["benchmarks"] * len(gated)
    rows = [
        (markdown_code(found["ab"]["command"]), len(runs), verdicts.total(), verdicts["SLOWER"]),
        (markdown_code(found["compare-fail"]["command"]), len(gated), readings, f"{alarms} runs"),
    ]
    lines = [
        "# Identical code on a busy machine",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}; beside them a process in bursts.",
        f"`python results/false_alarms.py --ab {len(runs)} --gate {len(gated)}`",
        "",
        *markdown_table(("command", "runs:", "comparisons:", "said to be slower:"), rows),
        "",
        f"- Verdicts of `ab`: {counted(verdicts)}; a run took {seconds} s (median).",
        f"- Exit statuses: of `ab` {counted(Counter(run['status'] for run in runs))};"
        f" of pytest {counted(Counter(run['status'] for run in gated))}.",
        f"- {sum(run['noisy'] for run in gated)} of {readings} readings of pytest were NOISY: they decided nothing.",
    ]
    return "\n".join(lines) + "\n"


def counted(found: Counter[Any]) -> str:
    """`3 times SAME, 1 time FASTER`, the most frequent first."""
    return ", ".join(f"{count} time{'s' * (count != 1)} {name}" for name, count in found.most_common())


def cpu() -> str:
    """The processor's name."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()

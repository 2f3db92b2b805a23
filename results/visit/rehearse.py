"""`make rehearsal`: a visit in the environment of a card's machine, without the card; its table is `docs/rehearsal.md`.

It makes a Python 3.12 with the versions that such a machine has and with none of the packages that it lacks, copies the
committed tree without git, and runs what a visit runs, on the CPU, and the compilation of every kernel for sm_90a.  It
fetches gigabytes once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "rehearsal"
PINS = (
    "torch==2.11.0",
    "triton==3.6.0",
    "cupy-cuda13x==14.2.0",
    "numpy==2.5.2",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
)
"""Packages whose versions matter: the compilers, and the packages that call them."""
BESIDE = (
    "transformers==5.17.0", "tokenizers==0.23.2", "safetensors==0.8.0", "pandas", "scipy", "matplotlib", "jinja2",
    "rich", "psutil", "packaging", "typer<0.20", "cloudpickle", "pytest", "pytest-benchmark", "pytest-xdist",
    "pytest-timeout", "hypothesis", "prometheus-client", "aiohttp", "pyarrow", "setuptools",
)  # fmt: skip
"""The other packages of such a machine; not gguf, junitparser, fastapi, uvicorn, pyzmq, ray or openai."""
PLAN = "results/targets/plan.json"
CELL = 160
"""The most characters of a cell of the table."""
PYTEST = ("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider")


class Step(NamedTuple):
    """One command, and what its success shows."""

    shows: str
    words: tuple[str, ...]
    limit_s: float
    fine: tuple[int, ...] = (0,)


STEPS = (
    Step("every command that a visit uses is imported", ("bench/run_from_checkout.py", "list", "--json"), 120),
    Step("the plan is made", ("bench/run_from_checkout.py", "suite", PLAN, "--plan"), 120),
    Step("the first command ends, with a CPU for a card", ("results/visit/visit.py", "first", "--limit", "575",
                                                           "--dry-run"), 600),
    Step("the second command ends; its tools find no card",
         ("results/visit/visit.py", "second", "--limit", "195"), 220),
    Step("a line of the queue ends", ("results/visit/visit.py", "suite", "--only", "rmsnorm.copy", "--limit", "200",
                                      "--dry-run"), 220),
    Step("steps, entries and kernels that hang, fault, lie and are killed at a drawn second",
         (*PYTEST, *(f"tests/suite/test_{name}.py" for name in ("visit", "suite_run", "suite_first_checks"))), 600),
    Step("the GPU's tests are collected", (*PYTEST, "-m", "gpu", "--collect-only", "tests"), 180),
    Step("launches on a card that is only said to be there",
         (*PYTEST, *(f"tests/contracts/test_{name}.py" for name in ("cuda", "capturable", "pdl"))), 900),
    Step("every kernel compiles for sm_90a, spills in no loop, and is what its ladder claims",
         (*PYTEST, "tests/claims/test_compile.py"), 1800),
    Step("everything that the targets launch compiles", ("-m", "rooflab.bench.suite.ahead", PLAN), 1200),
    Step("all cases of all checks and of all models compile", ("-m", "rooflab.bench.suite.ahead"), 3000),
)  # fmt: skip


def environment() -> Path:
    """The Python of such a machine, made once."""
    python, known = PLACE / "bin" / "python", PLACE / "packages.txt"
    wanted = " ".join((*PINS, *BESIDE))
    if not known.exists() or known.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PLACE)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PINS, *BESIDE], check=True)
        known.write_text(wanted)
    return python


def copy_of_the_tree(folder: Path) -> Path:
    """Copies the committed tree without git, and the wheels that a visit takes along."""
    tree = folder / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(tree)], input=archive, check=True)
    if (ROOT / "wheelhouse").is_dir():
        shutil.copytree(ROOT / "wheelhouse", tree / "wheelhouse", ignore=shutil.ignore_patterns("fa3*", "*.2"))
    return tree


def run(step: Step, python: Path, tree: Path, place: Path) -> dict[str, str]:
    """Runs a step; returns its row of the table."""
    began = time.monotonic()
    variables = os.environ | {
        "PYTHONPATH": f"{tree / 'build' / 'checkout'}:{tree / 'results'}",
        "VISIT_PLACE": str(place),
        "OUT": str(place),
        "OMP_NUM_THREADS": "1",
        "ROOFLAB_COMMIT": "",
    }
    variables.pop("PYTEST_ADDOPTS", None)
    with (PLACE / "log.txt").open("a+") as log:
        start = log.seek(0, os.SEEK_END)
        try:
            words = [str(python), *step.words]
            done = subprocess.run(words, cwd=tree, env=variables, stdout=log, stderr=log, timeout=step.limit_s)
            how = "fine" if done.returncode in step.fine else f"**exit status {done.returncode}**"
        except subprocess.TimeoutExpired:
            how = f"**longer than {step.limit_s:.0f} s**"
        log.seek(start)
        said = [line for line in log.read().splitlines() if line.strip()]
    notable = [
        line
        for line in said
        if re.match(r"FAILED|ERROR|.*(passed|failed|selected|tests collected|.* s of a core)", line)
    ]
    last = _end_of(notable or said).replace("|", "\\|")
    command = " ".join(("python", *step.words))
    print(f"{time.monotonic() - began:6.0f} s  {how}  {step.shows}: {last}", flush=True)
    return {"shows": step.shows, "command": command, "s": f"{time.monotonic() - began:.0f}", "how": how, "said": last}


def _end_of(lines: list[str]) -> str:
    """The last lines that contain a word, whole, as many as fit in a cell; a longer line is cut at a word."""
    found: list[str] = []
    for line in (" ".join(line.split()) for line in reversed(lines) if re.search("[A-Za-z]", line)):
        if found and len(" / ".join([line, *found])) > CELL:
            break
        found.insert(0, line)
    text = " / ".join(found)
    return text if len(text) <= CELL else f"{text[: CELL - 1].rpartition(' ')[0]} …"


def main() -> None:
    """Runs all steps and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", type=int, nargs="*", help="numbers of steps, from 1; without --out the table is printed"
    )
    parser.add_argument("--out", type=Path, help="docs/rehearsal.md by default")
    options = parser.parse_args()
    python = environment()
    asked = "import json, torch, triton, cupy, numpy; print(json.dumps([torch.__version__, triton.__version__, "
    asked += "cupy.__version__, numpy.__version__]))"
    versions = json.loads(subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        place = Path(folder) / "place"
        place.mkdir()
        (PLACE / "log.txt").unlink(missing_ok=True)
        # The first step makes build/checkout, which is on the path of all later steps.
        chosen = [step for number, step in enumerate(STEPS, 1) if number == 1 or number in (options.only or [number])]
        rows = [run(step, python, tree, place) for step in chosen]
    text = ["# A visit to a card, rehearsed without one", ""]
    text += [f"{datetime.now(UTC):%Y-%m-%d}, commit {commit[:10]}, made by `make rehearsal`. Python 3.12, torch"]
    text += [f"{versions[0]}, triton {versions[1]}, CuPy {versions[2]}, NumPy {versions[3]}, NVRTC 13.0.88; none of"]
    text += ["the packages that a card's machine lacks, no git, no driver. Nothing here ran on a GPU.", ""]
    text += ["| what it shows | command | s | | what it said |", "|---|---|--:|---|---|"]
    text += [f"| {row['shows']} | `{row['command']}` | {row['s']} | {row['how']} | {row['said']} |" for row in rows]
    if options.only and not options.out:
        print("\n".join(text))
    else:
        (options.out or ROOT / "docs" / "rehearsal.md").write_text("\n".join(text) + "\n")
    raise SystemExit(any(row["how"] != "fine" for row in rows))


if __name__ == "__main__":
    main()

"""Which wrong kernels the default check finds, and which right ones it refuses: tests/zoo, one kernel a core.

    python results/check/make.py --out results/check/README.md                                        # an hour
    python results/check/make.py --folder results/strangers/kernels --out build/strangers/check.md

Each wrong kernel is checked in three seeds, each right one in five while another process keeps every core busy.  Of a
folder, whose files' docstrings begin with WRONG or RIGHT, right kernels have the time of wrong ones, with a core of
their own, in one seed.  A kernel has the time of `rooflab check`, on one core, and runs where the command would
run it.  The page is written, and beside it `check.json`, a row for each kernel and seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median

import torch

from rooflab.bench.base.plain import markdown_table
from rooflab.bench.checks.drawn import drawn_checks, turns_of
from rooflab.bench.cli.kernels import CHECK_LIMIT_S
from rooflab.bench.core.check_data import CheckResult, CheckTask
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.outside import Checkers
from rooflab.bench.core.process import cores
from rooflab.bench.core.record import NOT_RUN
from rooflab.bench.core.select import Selection
from rooflab.bench.emulate import emulators
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import Kernel

ZOO = Path(__file__).parents[2] / "tests" / "zoo"
WRONG = ("strides.py", "values.py", "pages.py", "options.py", "sizes.py", "kept.py")
RIGHT = ("right.py", "right_memory.py")
CPU = torch.device("cpu")
RIGHT_S = 8.0
"""The seconds for a right kernel, which has no fault that would end its checks."""


@dataclass(frozen=True)
class Outcome:
    """The result of the default check of one kernel."""

    kernel: str
    seed: int
    fault: str
    """The first fault; empty if no check failed."""
    run: str
    """The run of the check in which the fault showed."""
    checks: int
    seconds: float


@contextmanager
def loaded(files: Sequence[str | Path]) -> Iterator[list[Kernel]]:
    """Yields the kernels of files (of tests/zoo by their names), which are registered meanwhile."""
    kernels = [kernel for file in files for kernel in registry.load_file(ZOO / file)]
    try:
        yield kernels
    finally:
        for kernel in kernels:
            registry._kernels.pop(kernel.id)


def first_fault(
    kernel: Kernel, seed: int, check: Callable[[CheckTask], CheckResult], limit_s: float = inf, most: int | None = None
) -> Outcome:
    """Makes the checks of `rooflab check`, in its order, up to the first fault, `limit_s` seconds, or `most` checks."""
    asked = drawn_checks(Selection({kernel.op: (kernel,)}, (), (), (), CPU, seed))
    turns, begun, made = turns_of(asked), time.monotonic(), 0
    for place in sorted(range(len(asked)), key=turns.__getitem__)[:most]:
        if time.monotonic() - begun > limit_s:
            break
        result = check(asked[place])
        made += 1
        if result.status not in ("OK", "OUT_OF_MEMORY", *NOT_RUN):  # a lack of memory is no kernel's fault
            run = result.labels[-1] if result.labels else result.status
            return Outcome(kernel.id, seed, result.describe(), run, made, time.monotonic() - begun)
    return Outcome(kernel.id, seed, "", "", made, time.monotonic() - begun)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keeps each core busy with another process."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores())]
    try:
        yield
    finally:
        for other in others:
            other.kill()


def outcomes(kernels: Sequence[Kernel], seed: int, limit_s: float) -> list[Outcome]:
    """The outcome of each kernel, one kernel per core, with `limit_s` seconds each."""
    check = Checkers(CPU, emulators())
    with ThreadPoolExecutor(cores()) as pool:
        return [*pool.map(lambda kernel: first_fault(kernel, seed, check, limit_s), kernels)]


def page(wrong: Sequence[Outcome], right: Sequence[Outcome], machine: str) -> str:
    lines = [
        "# The default check against wrong and right kernels",
        "",
        f"`python results/check/make.py`, on {machine}.",
        "A kernel has one core.",
        "",
    ]
    rows = list[tuple[object, ...]]()
    for seed in sorted({one.seed for one in wrong}):
        own = [one for one in wrong if one.seed == seed]
        found = [one.seconds for one in own if one.fault]
        missed = ", ".join(one.kernel for one in own if not one.fault) or "none"
        rows.append((seed, len(own), len(found), f"{median(found):.1f}", f"{max(found):.0f}", missed))
    lines += [*markdown_table(("seed", "wrong kernels:", "found:", "median s:", "longest s:", "missed"), rows), ""]
    rows.clear()
    for seed in sorted({one.seed for one in right}):
        own = [one for one in right if one.seed == seed]
        refused = ", ".join(one.fault for one in own if one.fault) or "none"
        rows.append((seed, len(own), sum(one.checks for one in own), refused))
    lines += markdown_table(("seed", "right kernels:", "checks:", "refused"), rows)
    runs = Counter(kind_of(one.run) for one in wrong if one.fault)
    lines += ["", "What the first fault of a wrong kernel showed, over all seeds:", ""]
    lines += markdown_table(("run", "faults:"), runs.most_common())
    within = [sum(one.checks <= checks for one in wrong if one.fault) for checks in (1, 3, 10, 30)]
    lines += ["", f"Of {sum(runs.values())} found, {within[0]} showed in the first check, {within[1]} in the first 3, "]
    lines[-1] += f"{within[2]} in the first 10, {within[3]} in the first 30."
    return "\n".join(lines) + "\n"


def kind_of(run: str) -> str:
    """The label of a run, without the names of arguments."""
    words = run.split()
    if words[0] in ("planted", "expanded"):
        return words[0]
    if run.startswith("other data,"):
        return " ".join(words[:3])  # padded, apart, turned, far, out
    return run if run.startswith(("other data", "first")) else "other options" if words[0] == "other" else run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("README.md"))
    parser.add_argument("--folder", type=Path, help="kernels of this folder, in place of those of tests/zoo")
    given = parser.parse_args()
    out, wrong_files, right_files = given.out, list[str | Path](WRONG), list[str | Path](RIGHT)
    if given.folder:
        texts = {path.absolute(): path.read_text() for path in sorted(given.folder.glob("*.py"))}
        wrong_files, right_files = (
            [path for path in texts if texts[path][3:].startswith(k)] for k in ("WRONG", "RIGHT")
        )
    right_s, right_seeds = (CHECK_LIMIT_S, [1]) if given.folder else (RIGHT_S, [1, 2, 3, 4, 5])
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = Environment.now()
    about = f"{cores()} cores of {machine.cpu}, torch {machine.torch}; a wrong kernel has {CHECK_LIMIT_S:.0f} s, "
    about += f"a right one {right_s:.0f} s"
    wrong, right = list[Outcome](), list[Outcome]()

    def write() -> None:  # called after each seed, because all seeds take most of an hour
        write_whole(out, page(wrong, right, about))
        rows = [asdict(one) | {"fault": one.fault[:160], "seconds": round(one.seconds, 1)} for one in (*wrong, *right)]
        write_whole(out.with_name("check.json"), "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")

    for seed in (1, 2, 3):
        with loaded(wrong_files) as kernels:
            wrong += outcomes(kernels, seed, CHECK_LIMIT_S)
        write()
    for seed in right_seeds:
        with loaded(right_files) as kernels, nullcontext() if given.folder else busy_cores():
            right += outcomes(kernels, seed, right_s)
        write()
    print(out.read_text(), end="")


if __name__ == "__main__":
    main()

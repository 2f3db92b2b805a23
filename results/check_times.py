"""The time of each check of an op's CPU kernel and of one in Triton, as `rooflab check` makes them.

    python results/check_times.py rmsnorm --seconds 5 --out times.jsonl

A line of the file is a check: op, kernel, case, scheme, what it plants, its status and its seconds.  To compare two
commits, run it in both by turns, and join the lines of equal checks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import monotonic

from rooflab.bench.checks.drawn import drawn_checks, turns_of
from rooflab.bench.core.check_data import CheckResult, CheckTask
from rooflab.bench.core.outside import Checkers
from rooflab.bench.core.select import Selection
from rooflab.bench.emulate import emulators
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole


class Timed(Checkers):
    """Makes checks, and keeps their seconds."""

    rows: list[tuple[object, ...]]

    def __call__(self, item: CheckTask) -> CheckResult:
        began = monotonic()
        found = super().__call__(item)
        what = item.kernel.op, item.kernel.name, item.case.id, item.scheme.name, str(item.planted), found.status
        self.rows.append((*what, round(monotonic() - began, 4)))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("--seconds", type=float, default=5.0, help="for the checks of one kernel")
    parser.add_argument("--out", type=Path, required=True)
    given, lines = parser.parse_args(), list[str]()
    optimized = [kernel for kernel in registry.kernels(given.op).values() if kernel.role == "optimized"]
    first = {kernel.backend: kernel.name for kernel in reversed(optimized)}
    for name in (first[backend] for backend in ("cpp", "triton") if backend in first):
        chosen = Selection.of(given.op, [name], ["smoke", "edge"], None, None, None, 1)
        asked = drawn_checks(chosen)
        turns = turns_of(asked)
        asked = [asked[place] for place in sorted(range(len(asked)), key=turns.__getitem__)]
        timed = Timed(chosen.device, emulators())
        timed.rows = list[tuple[object, ...]]()
        timed.start(asked)
        for _ in timed.each(asked, given.seconds):
            pass
        lines += map(json.dumps, timed.rows)
    write_whole(given.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

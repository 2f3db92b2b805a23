"""Measures a target and judges it: `python results/targets/judge.py bar:gemm.bf16_large --out FOLDER`.

`rooflab suite results/targets/plan.json` runs all of them in order of value, within a budget.  With `--plan`, this
prints that file: `python results/targets/judge.py --plan > results/targets/plan.json`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from targets import again, attention, engine, flush, gemm, lab, one_token, rows, sampling, serving, worst
from targets.target import AcceptanceTarget

from rooflab.bench.suite.step import context_of, end, parser

AGAINST_LIBRARY = [one for file in (gemm, attention, one_token, rows, sampling) for one in file.TARGETS]
EVERY: dict[str, AcceptanceTarget] = {
    one.id: one
    for one in (
        *AGAINST_LIBRARY,
        *engine.TARGETS,
        *flush.TARGETS,
        *lab.TARGETS,
        *serving.TARGETS,
        again.target_for(AGAINST_LIBRARY),
        worst.target_for(AGAINST_LIBRARY),
    )
}


def main() -> None:
    """Judges the target that the command line names, or prints the plan."""
    if sys.argv[1:] == ["--plan"]:
        print(json.dumps([one.entry.to_json() for one in EVERY.values()], indent=1))
        return
    options = parser(__doc__.splitlines()[0])
    options.add_argument("target", choices=EVERY)
    told = options.parse_args()
    chosen = EVERY[told.target]
    end(context_of(told), partial(chosen.call, **chosen.arguments))


if __name__ == "__main__":
    main()

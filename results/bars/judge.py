"""Measures a bar and judges it: `python results/bars/judge.py bar:gemm.bf16_large --out FOLDER`.

`rooflab suite --plan-file results/bars/plan.json` runs all of them in order of value, within a budget.  With `--plan`,
this prints that file: `python results/bars/judge.py --plan > results/bars/plan.json`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bars import again, attention, engine, flush, gemm, lab, one_token, rows, sampling, serving, worst  # noqa: E402
from bars.bar import Bar  # noqa: E402

from rooflab.bench.suite.step import context_of, end, parser  # noqa: E402

AGAINST_LIBRARY = [one for file in (gemm, attention, one_token, rows, sampling) for one in file.BARS]
EVERY: dict[str, Bar] = {
    one.id: one
    for one in (
        *AGAINST_LIBRARY,
        *engine.BARS,
        *flush.BARS,
        *lab.BARS,
        *serving.BARS,
        again.bar_for(AGAINST_LIBRARY),
        worst.bar_for(AGAINST_LIBRARY),
    )
}


def main() -> None:
    """Judges the bar that is named, or prints the plan."""
    if sys.argv[1:] == ["--plan"]:
        print(json.dumps([one.entry.to_json() for one in EVERY.values()], indent=1))
        return
    options = parser(__doc__.splitlines()[0])
    options.add_argument("bar", choices=EVERY)
    told = options.parse_args()
    chosen = EVERY[told.bar]
    end(context_of(told), partial(chosen.call, **chosen.arguments))


if __name__ == "__main__":
    main()

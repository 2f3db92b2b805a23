"""The queue of a card: what is open, in lines that fit a visit, as commands that there are."""

from __future__ import annotations

import next_visit
from bars.judge import EVERY

from rooflab.bench.suite.plan import make_plan


def listed(text):
    """The bars of each line of a page, and the commands."""
    lines = [part.splitlines() for part in text.split("\n## ")[1:]]
    names = [[row.split(" | ")[0].removeprefix("| ") for row in line if row.startswith("| ")][1:] for line in lines]
    return names, [word for line in lines for word in line if word.startswith("    python3")]


def test_a_card_that_nobody_has_visited_has_everything_in_lines_that_fit():
    names, commands = listed(next_visit.page("results/h100", {}))
    every = {name.removeprefix("bar:") for name in EVERY} - {"ab.false_alarms", *next_visit.OF_A_RUN}
    assert sorted(name for line in names for name in line) == sorted(every), "each once; the A/B's takes half an hour"
    assert "gemm.bf16_large" in names[0] and "search:gemm.cooperative" in names[0]
    assert "flash_attention.prefill_d128" in names[1]
    for line, command in zip(names, commands, strict=True):
        told = command.split()
        assert [told[place + 1] for place, word in enumerate(told) if word == "--only"] == line
        entries = make_plan(line, [next_visit.PLAN])
        assert sum(entry.cost_s for entry in entries) <= next_visit.SECONDS, command

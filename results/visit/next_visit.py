"""What the next visits to a card should measure, from the records of the visits before.

    python results/visit/next_visit.py results/h100 --out results/h100/queue.md

A line is one command of at most 540 s.  A visit takes the first line; when its records are committed, the page is made
again.  A target that is met is not measured again: `rooflab suite` can, if its kernels changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from targets.judge import EVERY

from rooflab.bench.base.plain import markdown_table
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Entry
from rooflab.bench.suite.plan import make_plan
from rooflab.kernels._files import write_whole

PLAN = Path(__file__).resolve().parents[1] / "targets" / "plan.json"
SECONDS = 540.0
LAST_S = 20.0
"""The seconds of a command that no entry gets: its start, and its summary."""
THEMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("products", ("gemm", "gemm_fp8", "gemm_w4a16", "gemm_w8a16", "gemm_silu_and_mul")),
    ("attention", ("flash_attention", "paged_attention", "rope_and_cache")),
    ("rows and one token", ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "sample")),
    ("the engine", ("engine", "serving", "latency")),
    ("the lab's own tools", ("emulator", "ab", "flush")),
)
"""Entries that are measured together, the most wanted first: kernels of one line share first checks and compilation."""
OF_A_RUN = ("again", "counted")
"""Entries about the targets of their own run, which mean nothing alone."""


@dataclass(frozen=True)
class Known:
    """The newest result of an entry, and the folder of its run."""

    outcome: str
    why: str
    run: str


def known_in(card: Path) -> dict[str, Known]:
    """The newest result of every target and measurement in the runs below a folder; runs are ordered by their names."""
    found: dict[str, Known] = {}
    for path in sorted(card.rglob(state.RESULT_FILE)):
        values = json.loads(path.read_text())
        for entry_id in EVERY:
            if state.folder_of(path.parents[1], entry_id) == path.parent:
                outcome = "PARTIAL" if values["status"] == "PARTIAL" else values["bar"] or values["status"]
                why = values["reason"] or state.figures_text(dict(values["figures"]))
                found[entry_id] = Known(outcome, " ".join(why.split())[:160], str(path.parents[1].relative_to(card)))
    return found


def is_open(entry: Entry, known: Mapping[str, Known]) -> bool:
    """Whether a visit should still measure the entry."""
    return entry.id not in known or known[entry.id].outcome not in ("MET", "DONE")


def theme_of(entry: Entry) -> str:
    """The theme of an entry of the targets' plan."""
    word = (
        entry.id.removeprefix("bar:")
        .removeprefix("measure:")
        .removeprefix("search:")
        .replace(":", ".")
        .partition(".")[0]
    )
    return next(name for name, words in THEMES if word in words)


@dataclass
class Line:
    """One command of the queue, with its entries."""

    theme: str
    entries: list[Entry]

    @property
    def names(self) -> list[str]:
        return [entry.id.removeprefix("bar:") for entry in self.entries]

    @property
    def seconds(self) -> float:
        """The seconds of the line, with the entries that its entries need first."""
        return sum(entry.cost_s for entry in make_plan(self.names, [PLAN])) + LAST_S


def lines_of(known: Mapping[str, Known]) -> list[Line]:
    """The open entries in lines of limited time: the first line of each theme in their order, then the second lines."""
    entries = {entry.id: entry for entry in make_plan(files=[PLAN])}
    lines: list[Line] = []
    for entry_id in sorted(EVERY, key=lambda name: -entries[name].value):
        entry = entries[entry_id]
        if entry_id in OF_A_RUN or not is_open(entry, known) or Line("", [entry]).seconds > SECONDS:
            continue
        for line in (one for one in lines if one.theme == theme_of(entry)):
            if Line(line.theme, [*line.entries, entry]).seconds <= SECONDS:
                line.entries.append(entry)
                break
        else:
            lines.append(Line(theme_of(entry), [entry]))
    order = [name for name, _ in THEMES]
    before = Counter[str]()
    ranks: dict[int, tuple[int, int]] = {}
    for place, line in enumerate(lines):
        ranks[place] = before[line.theme], order.index(line.theme)
        before[line.theme] += 1
    return [lines[place] for place in sorted(ranks, key=ranks.__getitem__)]


def page(card: str, known: Mapping[str, Known]) -> str:
    """The text of the page."""
    text = [f"# Next on {card}", "", f"Made by `python results/visit/next_visit.py {card} --out {card}/queue.md`."]
    text += ["Each line is one command of at most nine minutes; the first is the next visit's.", ""]
    for number, line in enumerate(lines_of(known), 1):
        only = " ".join(f"--only {name}" for name in line.names)
        text += [f"## {number}. {line.theme}, about {line.seconds:.0f} s", ""]
        text += [f"    python3 results/visit/visit.py suite {only} --trust {card} --limit {SECONDS:.0f}", ""]
        rows = []
        for entry in line.entries:
            one = known.get(entry.id, Known("not measured", "", ""))
            rows.append((entry.id.removeprefix("bar:"), f"{entry.cost_s:.0f}", one.outcome, one.why))
        text += [*markdown_table(("target", "s:", "so far", "what came of it"), rows), ""]
    done = [(name, one) for name, one in known.items() if one.outcome in ("MET", "DONE")]
    text += ["## Done", "", *(f"- {name.removeprefix('bar:')}: {one.outcome} ({one.run})" for name, one in done)]
    return "\n".join(text if done else text[:-2]).rstrip() + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Writes or prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("card", type=Path, help="folder of a card's runs, such as results/h100; it may not exist yet")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    text = page(options.card.as_posix(), known_in(options.card))
    if options.out:
        write_whole(options.out, text)
    print(text)


if __name__ == "__main__":
    main()

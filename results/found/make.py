"""Runs the rebuilt public faults in the emulator, and writes what it says into docs/found.md and found.json.

    python results/found/make.py           # all, two minutes
    python results/found/make.py --only state_store

Each launcher of `kernels/launchers.py` runs twice, as by `rooflab emulate`: with the fault, and mended, which must be
silent.
"""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from rooflab.bench.base.plain import Marked, markdown_cell, markdown_code, markdown_table
from rooflab.bench.compile.launchers import selected
from rooflab.bench.emulate.calls import call
from rooflab.kernels._files import write_whole

HERE = Path(__file__).resolve().parent
RECORD, PAGE, LAUNCHERS = HERE / "found.json", HERE.parents[1] / "docs/found.md", HERE / "kernels/launchers.py"
OTHERS = HERE.parent / "compatibility/kernels.json"
BEGIN, END = "<!-- results/found/make.py writes what follows -->\n", "<!-- and ends here -->\n"
Case = dict[str, Any]
CASES: list[Case] = tomllib.loads((HERE / "cases.toml").read_text())["case"]


def key(case: Case) -> str:
    """The name of a case in the record; empty if there is nothing to run."""
    return " ".join(filter(None, (case.get("launcher"), case.get("options"))))


def said(case: Case, mended: bool) -> list[list[str]]:
    """What the emulator says of one run, as pairs of a rule and a sentence; `values` is the rule of wrong values."""
    options, values = case.get("options", ""), case.get("rule") == "values"
    arguments = f"mended={str(mended).lower()}" + ("" if values or not options else f",{options}")
    target = selected(f"{LAUNCHERS}::{case['launcher']}", [options] if values else (), arguments, "")
    answer = call(target, reference=f"{LAUNCHERS}::{case['launcher']}_reference" if values else None).answer
    found = [[finding["rule"], finding["text"]] for finding in answer["findings"]]
    return found or ([] if answer["status"] == "OK" else [["values", answer["reason"]]])


def outcome(case: Case, runs: dict[str, Any]) -> Marked:
    """The cell that says what the emulator said, or why nothing."""
    for name, words in (("impossible", "cannot be"), ("silent", "nothing, on purpose"), ("pending", "nothing yet")):
        if name in case:
            return markdown_cell(f"{words}: {case[name]}")
    rule, text = runs[key(case)]["faulty"][0]
    return Marked(f"{markdown_code(rule)}: {markdown_cell(text)}")


def page_of(runs: dict[str, Any]) -> str:
    """The tables of docs/found.md; the last has the errors in the record of other projects' kernels."""
    tables: dict[str, list[tuple[object, ...]]] = {}
    for case in CASES:
        name = f"Planted by others: {case['set']}" if "set" in case else "Reported by others, rebuilt"
        source = markdown_cell(case["members"]) if "set" in case else Marked(f"[{case['source']}]({case['url']})")
        launcher = markdown_code(key(case)) if key(case) else ""
        row = (source, Marked(case["fault"]), launcher, outcome(case, runs), case.get("upstream", ""))
        tables.setdefault(name, []).append(row if "source" in case else row[:4])
    lines = []
    for name, rows in tables.items():
        columns = ("source", "fault", "launcher", "the emulator, at the first place", "upstream")
        lines += [f"## {name}", "", *markdown_table(columns[: len(rows[0])], rows), ""]
    lines += ["## In public projects' kernels, unchanged", ""]
    rows = []
    for record in json.loads(OTHERS.read_text()):
        found = [(kernel["kernel"], race) for kernel in record["kernels"] for race in kernel["races"]]
        found += [(record["entry"], record["refused"])] if record.get("refused") else []
        rows += [(record["project"], *each) for each in found]
    return "\n".join(lines + markdown_table(("project", "kernel or call", "found"), rows)) + "\n"


def main() -> None:
    """Runs the cases, keeps the record and writes the page's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a launcher; the record keeps the others")
    only = parser.parse_args().only
    runs = json.loads(RECORD.read_text()) if only else {}
    for case in CASES:
        if key(case) and only in ("", case["launcher"]):
            runs[key(case)] = {"faulty": said(case, False), "mended": said(case, True)}
            print(key(case), *runs[key(case)]["faulty"][:1], *runs[key(case)]["mended"])
    write_whole(RECORD, json.dumps(runs, indent=1, allow_nan=False) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    write_whole(PAGE, before + BEGIN + page_of(runs) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()

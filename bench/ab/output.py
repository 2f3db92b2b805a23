"""Writes the outcomes of an A/B comparison as rows, JUnit XML and Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooflab.bench.ab.verdict import EXIT_STATUS, Outcome, status_of
from rooflab.bench.base.plain import markdown_cell, markdown_code, markdown_table
from rooflab.bench.base.statuses import ExitStatus
from rooflab.kernels._files import write_whole
from rooflab.roofline.names import visible
from rooflab.roofline.numbers import change

MAX_ROWS = 10
"""A comment shows this many comparisons, the worst ones; the others are folded."""
COLUMNS = ("comparison", "verdict", "A_ms", "B_ms", "effect", "from", "to", "visible", "pairs", "for_1%", "reason")


def row(outcome: Outcome) -> dict[str, Any]:
    """Returns one row of the table of outcomes, for the terminal and for Markdown."""
    return {
        "comparison": outcome.key,
        "verdict": outcome.verdict,
        "A_ms": outcome.baseline_s and outcome.baseline_s * 1e3,
        "B_ms": outcome.candidate_s and outcome.candidate_s * 1e3,
        "effect": change(outcome.effect),
        "from": change(outcome.effect_low),
        "to": change(outcome.effect_high),
        "visible": change(outcome.smallest_visible_effect),
        "pairs": outcome.pairs or None,
        "for_1%": outcome.pairs_for_1_percent,
        "reason": outcome.reason,
    }


def as_mapping(outcome: Outcome) -> dict[str, Any]:
    """Returns all fields of an outcome, except the raw measurements, which the records hold."""
    return {name: value for name, value in vars(outcome).items() if name != "evidence"}


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns the number of outcomes for each verdict, the worst verdict first, such as `1 SLOWER, 2 SAME`."""
    counts = Counter(str(outcome.verdict) for outcome in outcomes)
    order = ("INCORRECT", "FAILED", "INVALID", "MISSING", "SLOWER", "UNRESOLVED", "SAME", "FASTER")
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict]) or "nothing was compared"


def power(outcomes: Sequence[Outcome]) -> str:
    """Returns a sentence with the smallest effect that the run could have detected."""
    if not any(outcome.pairs for outcome in outcomes):
        return "Nothing was measured."
    visible_effects = [value for outcome in outcomes if (value := outcome.smallest_visible_effect) is not None]
    pair_counts = [value for outcome in outcomes if (value := outcome.pairs_for_1_percent) is not None]
    if not visible_effects or not pair_counts:
        return "No effect could have been seen: that takes at least 5 pairs."
    effect_text = f"{change(statistics.median(visible_effects))}{_worst(change(max(visible_effects)), visible_effects)}"
    pair_text = f"{statistics.median(pair_counts):.0f} pairs{_worst(f'{max(pair_counts):.0f}', pair_counts)}"
    return f"Smallest effect seen with a chance of 80%: {effect_text}. To tell 1% from no effect: {pair_text}."


def _worst(text: str, values: Sequence[float]) -> str:
    return f" (median; worst {text})" if len(values) > 1 else ""


def write_junit(path: Path, outcomes: Sequence[Outcome], strict: bool) -> None:
    """Writes a test case per comparison.  It fails on a nonzero exit status; otherwise, UNRESOLVED means skipped."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite  # a GPU machine may lack it

    test_suite = TestSuite("rooflab ab")
    for outcome in outcomes:
        key = visible(outcome.key)  # XML has no place for a control character
        test_case = TestCase(key, classname=key.partition(" ")[0].replace("/", "."), time=outcome.candidate_s or 0.0)
        outcome_text = visible(" ".join(f"{outcome.verdict}: {change(outcome.effect)} {outcome.reason}".split()))
        status = status_of(outcome, strict)
        if status == ExitStatus.INVALID:
            test_case.result = [Error(outcome_text, outcome.verdict)]
        elif status:
            test_case.result = [Failure(outcome_text, outcome.verdict)]
        elif outcome.verdict == "UNRESOLVED":
            test_case.result = [Skipped(outcome_text, outcome.verdict)]
        test_suite.add_testcase(test_case)
    junit_document = JUnitXml()
    junit_document.add_testsuite(test_suite)
    write_whole(path, junit_document.tostring())  # type: ignore[no-untyped-call]


def write_markdown(path: Path, title: str, outcomes: Sequence[Outcome], notes: Sequence[str]) -> None:
    """Writes a Markdown comment: a table of the `MAX_ROWS` worst comparisons, and a folded table of the others."""
    verdicts = list(EXIT_STATUS)
    ranked_outcomes = sorted(outcomes, key=lambda outcome: (verdicts.index(outcome.verdict), -(outcome.effect or 0.0)))
    lines = [f"### {markdown_cell(title)}", "", f"**{summary(outcomes)}**", "", *_table(ranked_outcomes[:MAX_ROWS])]
    if len(ranked_outcomes) > MAX_ROWS:
        details_html = f"<details><summary>{len(ranked_outcomes) - MAX_ROWS} more</summary>"
        lines += ["", details_html, "", *_table(ranked_outcomes[MAX_ROWS:]), "", "</details>"]
    lines += ["", power(outcomes), *(f"- {markdown_cell(note)}" for note in notes), ""]
    write_whole(path, "\n".join(lines))


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    headings = ("comparison", "verdict", "A ms:", "B ms:", "B over A:", "95% bounds", "visible:", "pairs:", "why")
    rows = []
    for cells in map(row, outcomes):
        times_ms = ["" if cells[name] is None else f"{cells[name]:.4g}" for name in ("A_ms", "B_ms")]
        bounds = f"{cells['from']} to {cells['to']}" if cells["from"] and cells["to"] else ""
        texts = [cells[name] for name in ("visible", "pairs", "reason")]
        rows.append([markdown_code(cells["comparison"]), cells["verdict"], *times_ms, cells["effect"], bounds, *texts])
    return markdown_table(headings, rows)

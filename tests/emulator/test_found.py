"""The page of public faults: its record has every case, its tables are those of the record, and the cases run again."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

FOUND = runpy.run_path(str(Path(__file__).parents[2] / "results/found/make.py"))
RUNS: dict[str, Any] = json.loads(FOUND["RECORD"].read_text())
CASES = [case for case in FOUND["CASES"] if FOUND["key"](case)]


def test_the_page_is_that_of_the_record_and_the_record_has_every_case() -> None:
    page = FOUND["PAGE"].read_text()
    assert page.partition(FOUND["BEGIN"])[2].partition(FOUND["END"])[0] == FOUND["page_of"](RUNS)
    assert list(RUNS) == [FOUND["key"](case) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=FOUND["key"])
def test_a_fault_is_found_by_its_rule_or_says_why_not_and_the_mended_form_is_silent(case: dict[str, str]) -> None:
    run = RUNS[FOUND["key"](case)]
    assert ("rule" in case) + ("pending" in case) + ("silent" in case) == 1
    assert {rule for rule, _ in run["faulty"]} == {case[each] for each in ("rule",) if each in case}
    assert run["mended"] == []


@pytest.mark.more
@pytest.mark.parametrize("case", CASES, ids=FOUND["key"])
def test_a_case_runs_as_in_the_record(case: dict[str, str]) -> None:
    run, faulty = RUNS[FOUND["key"](case)], FOUND["said"](case, False)
    assert not ("pending" in case and faulty), "it is found now: put its rule in cases.toml, and run make.py"
    assert {rule for rule, _ in faulty} == {rule for rule, _ in run["faulty"]}, faulty
    assert FOUND["said"](case, True) == []

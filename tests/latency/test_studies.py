"""The studies in a short form, on a tiny model: each study runs and has its required output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_config

from rooflab.bench.core.record_files import RunWriter, read
from rooflab.bench.latency.latency_records import study_record
from rooflab.bench.latency.pages import run_study, write_page
from rooflab.bench.latency.studies import STUDIES
from rooflab.bench.latency.study import Lab


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every study by name, and the page of them with its records."""
    folder = tmp_path_factory.mktemp("studies")
    write_config(folder / "tiny")
    lab = Lab(str(folder / "tiny"), dummy=True, quick=True, options={"device": "cpu"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rooflab.bench.latency.pages.why_noisy", lambda *_: "")
        writer, studies = RunWriter(folder / "page"), {}
        for name in STUDIES:
            studies[name] = run_study(name, lab)
            studies[name].draw(folder / "page")
            writer.write(study_record(studies[name], lab, writer.run_id))
    return studies, write_page(list(studies.values()), lab, writer.path)


@pytest.mark.more
def test_a_study_has_a_claim_a_number_and_a_figure(found: Any) -> None:
    """All in one test, since each process that has one of them would run all studies."""
    studies, page = found
    text, records = page.read_text(), read(page.parent)
    assert "`rooflab study --all --model tiny --dummy --smoke --device cpu --out page`" in text
    assert "verdicts say nothing" in text
    for name in STUDIES:
        study = studies[name]
        assert study.name == name and study.rows and study.source and any(letter.isdigit() for letter in study.number)
        assert study.verdict in ("holds", "holds in part", "fails")
        for column in (*study.curves.values(), *(study.band or ())):
            assert all(row[column] >= 0 for row in study.rows), column
        assert all(row.keys() == study.rows[0].keys() and study.x in row for row in study.rows)
        assert f"## {name}\n" in text and (page.parent / f"{name}.png").stat().st_size > 10_000
        record = next(one for one in records if one.case["study"] == name)
        assert record.case["verdict"] == study.verdict and record.case["model"] == "tiny" and record.metrics


@pytest.mark.more
def test_what_counts_tokens_is_the_same_on_any_machine(found: Any) -> None:
    contiguous, paged = found[0]["paging"].rows
    assert (contiguous["at_once"], paged["at_once"]) == (3, 6.5) and paged["waste"] < contiguous["waste"]
    fewer = found[0]["quantisation"].rows
    assert fewer[0]["error"] == 0 and 0 < fewer[1]["error"] < fewer[2]["error"] < 0.2
    assert fewer[0]["same_tokens"] == 1 == fewer[0]["gain"]
    # int8 has a scale of two bytes for each group of 32 codes.
    assert fewer[2]["predicted"] == pytest.approx(32 * 4 / (32 + 2))


@pytest.mark.parametrize(("busy", "ends"), [("", 0), ("it was busy", 13)])
def test_the_command(rooflab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str, ends: int) -> None:
    monkeypatch.setattr("rooflab.bench.latency.pages.why_noisy", lambda *_: busy)
    write_config(tmp_path / "tiny")
    asked = ("study", "paging", "--model", tmp_path / "tiny", "--dummy", "--smoke", "--device", "cpu")
    status, out, _ = rooflab(*asked, "--out", tmp_path / "out", "--json")
    (row,), (record,) = json.loads(out), read(tmp_path / "out")
    assert status == ends and row["name"] == "paging" and (tmp_path / "out" / "paging.png").is_file()
    assert (record.status, record.reason) == ("NOISY" if busy else "OK", busy)
    assert (row["verdict"] == "NOISY") == bool(busy)
    status, _, err = rooflab("study", "--all", "paging")
    assert status == 2 and "study: expected names of" in err
    status, _, err = rooflab("study", "fusion")
    assert status == 2 and "got 'fusion'" in err

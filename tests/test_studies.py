"""The studies in short, on a tiny model: each runs, and says what it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_config

from rooflab.bench.latency.pages import STUDIES, run_study, write_page
from rooflab.bench.latency.study import Lab, judged
from rooflab.roofline.model import Ceilings

CEILINGS = Ceilings("made up", "measured", 1e10, {"fp32": 1e11}, 1e10)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every study by name, and the page of them."""
    folder = tmp_path_factory.mktemp("studies")
    write_config(folder / "tiny")
    lab = Lab(str(folder / "tiny"), dummy=True, quick=True, options={"device": "cpu"})
    with pytest.MonkeyPatch.context() as patch:
        for module in ("ledger", "studies.intensity"):
            patch.setattr(f"rooflab.bench.latency.{module}.ceilings_for", lambda device: CEILINGS)
        studies = {name: run_study(name, lab) for name in STUDIES}
    return studies, write_page(list(studies.values()), folder / "page")


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_a_claim_a_number_and_a_figure(found: Any, name: str) -> None:
    study, page = found[0][name], found[1]
    assert study.name == name and study.rows and study.source and any(letter.isdigit() for letter in study.number)
    assert study.verdict in ("holds", "holds in part", "fails")
    assert {curve.panel for curve in study.curves} >= {0}
    for curve in study.curves:
        assert len(curve.x) == len(curve.y) > 0 and all(value >= 0 for value in curve.y), curve
    assert f"## {name}\n" in page.read_text() and (page.parent / f"{name}.png").stat().st_size > 10_000


def test_what_counts_tokens_is_the_same_on_any_machine(found: Any) -> None:
    contiguous, paged = found[0]["paging"].rows
    assert (contiguous["at_once"], paged["at_once"]) == (2.5, 7.25) and paged["waste"] < contiguous["waste"]
    assert all(row["flipped"] == 0 for row in found[0]["batch-invariance"].rows[:1])
    first = found[0]["batch-invariance"].rows[0]
    assert (first["first"], first["ulps"]) == ("none", 0), "alone is alone"
    fewer = found[0]["quantisation"].rows
    assert fewer[0]["error"] == 0 and 0 < fewer[1]["error"] < fewer[2]["error"] < 0.2
    bound = found[0]["launch-bound"].rows[-2:]
    assert bound[0]["batch_1"] > bound[1]["batch_1"], "the small model waits for launches"


def test_a_verdict_follows_its_number() -> None:
    assert [judged(number, 2, 1.2) for number in (2.0, 1.9, 1.1)] == ["holds", "holds in part", "fails"]


def test_the_command(rooflab: Any, tmp_path: Path) -> None:
    write_config(tmp_path / "tiny")
    asked = ("study", "paging", "--model", tmp_path / "tiny", "--dummy", "--smoke", "--device", "cpu")
    status, out, _ = rooflab(*asked, "--out", tmp_path / "out", "--json")
    (row,) = json.loads(out)
    assert status == 0 and row["name"] == "paging" and (tmp_path / "out" / "paging.png").is_file()
    for arguments, said in (
        (("study",), "study: expected names of"),
        (("study", "--all", "paging"), "study: expected names of"),
        (("study", "magic"), "study: expected one of"),
    ):
        status, _, err = rooflab(*arguments)
        assert status == 2 and said in err

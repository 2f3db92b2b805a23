"""The page about Hopper says what has run on a card and what has not, and so does the first screen of the README."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hopper
from bars import gemm
from test_bars import CASES, record

from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.suite.passed import CODE
from rooflab.bench.suite.state import folder_of
from rooflab.reference.spec import Case

ROOT = Path(__file__).parents[2]
LARGE = next(bar for bar in gemm.BARS if bar.id == "bar:gemm.bf16_large")


def test_the_readme_says_what_has_run_on_a_gpu():
    records = [record for gpu in ("h100", "h200") for record in hopper.records_on(gpu)]
    first_screen = " ".join((ROOT / "README.md").read_text().split("## ")[0].split())
    assert hopper.contact(records) in first_screen, "python results/hopper.py says it"
    assert hopper.contact(records) in (ROOT / "results" / "hopper.md").read_text()


def first(kernel, status, timestamp):
    environment = {CODE: "hash", "gpu": {"name": "NVIDIA H100 80GB HBM3"}}
    why = "" if status == "OK" else "no answer"
    told = {"kind": "check", "status": status, "reason": why, "basis": "bound", "bound_fraction": None}
    return record(kernel, CASES[0], None, environment=environment, timestamp=timestamp, **told)


def test_first_contact_counts_the_first_check_of_each_kernel():
    mended = [first("tma", "TIMEOUT", "2026-12-01T10:00:00+00:00"), first("tma", "OK", "2026-12-02T10:00:00+00:00")]
    right = first("gemv", "OK", "2026-12-02T10:00:00+00:00")
    plain = replace(right, kernel="later", environment={"gpu": None})
    said = "Of 2 kernels 1 were right when they first ran on a GPU (NVIDIA H100 80GB HBM3)."
    assert hopper.contact([*reversed(mended), right, plain]) == said


def test_what_was_measured_comes_before_what_was_predicted_and_losers_are_shown(tmp_path):
    folder = folder_of(tmp_path / "h100" / "20261201T100000Z" / "suite", LARGE.id)
    one, two = (Case.parse(text).id for text in LARGE.arguments["cases"][:2])
    RunWriter(folder, "r").write(
        record("library", one, 1.0, "library"), record("library", two, 1.0, "library"),
        record("cooperative", one, 0.5), record("cooperative", two, 1.25), record("tma", two, 0.1),
        record("theirs", two, 0.75, "peer", backend="cuda"),
    )  # fmt: skip
    found = hopper.measured(LARGE, "h100", tmp_path)
    assert [(each.kernel, each.rival, each.ratio, each.basis) for each in found] == [
        ("cooperative", "library", 2.0, "measured"), ("cooperative", "theirs", 0.6, "measured"),
    ], "the launcher's kernel over the best rival, whoever wrote it"  # fmt: skip
    assert hopper.measured(LARGE, "h200", tmp_path) == []
    text = hopper.page(hopper.get_device("h100"), found, "One sentence.", ["a"])
    assert "predicted" not in text and f"- gemm.bf16_large: cooperative at {two}: 0.60 of theirs (measured)" in text
    (axes,) = hopper.ratios_figure(found).axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert all(dot.get_markerfacecolor() != "none" for dot in dots) and len(dots) == 2

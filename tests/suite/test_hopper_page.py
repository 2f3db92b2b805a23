"""The page about Hopper says what has run on a card and what has not, and so does the first screen of the README."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hopper
from test_bars import CASES, record

from rooflab.bench.suite.passed import CODE

ROOT = Path(__file__).parents[2]


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

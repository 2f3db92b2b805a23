"""The page about Hopper says what has run on a card and what has not, and so does the first screen of the README."""

from __future__ import annotations

from pathlib import Path

import hopper

ROOT = Path(__file__).parents[2]


def test_the_readme_says_what_has_run_on_a_gpu():
    records = [record for gpu in ("h100", "h200") for record in hopper.records_on(gpu)]
    first_screen = " ".join((ROOT / "README.md").read_text().split("## ")[0].split())
    assert hopper.contact(records) in first_screen, "python results/hopper.py says it"
    assert hopper.contact(records) in (ROOT / "results" / "hopper.md").read_text()

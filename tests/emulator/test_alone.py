"""Tests that the emulator's tests use no op, kernel or registry of the lab, except in the files that are named here."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
OTHERS = r"^from rooflab\.(?!bench\.emulat(e|or)\b|bench\.core\.process )"


def test_only_named_files_know_the_lab() -> None:
    """The files that `make test-emulator` leaves out, and the process of one of them."""
    (names,) = re.findall(r"^OF_THE_LAB := (.*)$", (HERE.parents[1] / "Makefile").read_text(), re.MULTILINE)
    knowing = {file.name for file in HERE.glob("*.py") if re.search(OTHERS, file.read_text(), re.MULTILINE)}
    assert knowing == {*names.split(), "mutant_worker.py"}

"""Tests that the scripts which make the committed pages and tables start."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(file for file in (ROOT / "results").glob("*/*.py") if "ArgumentParser(" in file.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.parent.name}-{script.stem}")
def test_a_script_starts_and_says_what_it_does(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)  # as Python does for a script
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert ended.value.code == 0 and out.startswith(f"usage: {script.name}") and len(out.splitlines()) > 2

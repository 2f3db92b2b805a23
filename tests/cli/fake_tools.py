"""Stand-ins for NVIDIA's tools, for the tests of `rooflab profile`."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HEAD = """\
#!/bin/sh
'''exec' '{python}' "$0" "$@"
' '''
import json, os, sys, time
arguments = sys.argv[1:]
open({calls!r}, 'a').write(json.dumps([arguments, dict(os.environ)]) + '\\n')
"""
"""A shell starts Python, because no path with a space can stand behind `#!`."""


@pytest.fixture
def tool(monkeypatch, tmp_path) -> Callable[[str, str], Path]:
    """Puts programs on a PATH that holds nothing else: Python that sees `arguments`; returns the file of its calls."""
    programs, calls = tmp_path / "bin", tmp_path / "calls.jsonl"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def install(name: str, body: str) -> Path:
        path = programs / name
        path.write_text(HEAD.format(python=sys.executable, calls=str(calls)) + body + "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return calls

    return install

"""Stand-ins for NVIDIA's tools, for the tests of `rooflab profile`."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path


def fake_tools(monkeypatch, folder: Path) -> Callable[[str, str], Path]:
    """Puts programs on a PATH that holds nothing else: Python that sees `arguments`; returns the file of its calls."""
    programs = folder / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    calls = folder / "calls.jsonl"

    def install(name: str, body: str) -> Path:
        # A shell starts it: no path with a space can stand behind `#!`.
        lines = [
            "#!/bin/sh",
            f"'''exec' '{sys.executable}' \"$0\" \"$@\"",
            "' '''",
            "import json, os, sys, time",
            "arguments = sys.argv[1:]",
        ]
        lines.append(f"open({str(calls)!r}, 'a').write(json.dumps([arguments, dict(os.environ)]) + '\\n')")
        path = programs / name
        path.write_text("\n".join([*lines, body]) + "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return calls

    return install

"""Runs a command of the lab inside a step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run_command(words: Sequence[str]) -> tuple[int, Any, str]:
    """Returns the exit status, the JSON that the command printed (None if it printed none), and its standard error."""
    done = subprocess.run([sys.executable, "-m", "rooflab.bench", *words], capture_output=True, text=True)
    try:
        value = json.loads(done.stdout) if done.stdout.strip() else None
    except json.JSONDecodeError:
        value = {"output": done.stdout}
    return done.returncode, value, done.stderr.strip()

"""A command of `rooflab` as a child process, and a function found by its name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any


def find(call: str) -> Callable[..., Any]:
    """The function that `module:function` names.  Raises `ValueError` where there is none."""
    module, _, name = call.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise ValueError(f"call: expected a function of {module}, got {name!r}")
    found: Callable[..., Any] = function
    return found


def run_command(words: Sequence[str]) -> tuple[int, Any, str]:
    """Exit status, the JSON that the command printed (None where it printed none), and its standard error."""
    done = subprocess.run([sys.executable, "-m", "rooflab.bench", *words], capture_output=True, text=True)
    try:
        value = json.loads(done.stdout) if done.stdout.strip() else None
    except json.JSONDecodeError:
        value = {"output": done.stdout}
    return done.returncode, value, done.stderr.strip()

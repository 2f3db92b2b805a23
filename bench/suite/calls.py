"""A command of `rooflab` called inside a process, and a function found by its name."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
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
    """Exit status, the JSON that it printed (None where it printed none), and what it wrote to standard error."""
    from rooflab.bench.cli import run

    out, err, arguments = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["rooflab", *words]
    status = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = arguments
    try:
        value = json.loads(out.getvalue()) if out.getvalue().strip() else None
    except json.JSONDecodeError:
        value = {"output": out.getvalue()}
    return status, value, err.getvalue().strip()

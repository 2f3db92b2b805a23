"""Runs the command line inside the tests' process, which has already loaded torch and the kernels."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from rooflab.bench.cli.app import run


def run_command(words: Sequence[str]) -> tuple[int, Any, str]:
    """Exit status, the JSON that it printed (None where it printed none), and what it wrote to standard error."""
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

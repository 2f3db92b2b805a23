"""Runs one entry of the suite in a process that starts early and then waits for a Python command line.

Its imports take seconds, so it starts while another entry runs.  On a GPU each process runs one command and ends, so
that a broken CUDA context ends with the process.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def answer(request: Mapping[str, Any]) -> Any:
    """Runs a command in this process and returns its exit status.  An exception in the command ends the process."""
    os.environ.update(request["environment"])
    old_argv, path = sys.argv, list(sys.path)
    first, *words = request["words"]
    try:
        if first == "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *words]
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        sys.stdout.flush()
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return {"status": ended.code if isinstance(ended.code, int) else int(ended.code is not None)}
    finally:
        sys.argv, sys.path[:] = old_argv, path
    return {"status": 0}

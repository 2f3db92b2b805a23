"""Runs one entry of the suite.  The process starts early and waits for the command line of the entry.

It starts early because its imports take seconds.  On a GPU each process runs one command, so a broken CUDA context
cannot affect the next.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def answer(request: Mapping[str, Any]) -> Any:
    """Answers a request: runs its command line here.  Returns the exit status.  An exception ends the process."""
    os.environ.update(request["environment"])
    argv_before, import_paths = sys.argv, list(sys.path)
    command_word, *argument_words = request["words"]
    try:
        if command_word == "-m":
            sys.argv = argument_words
            runpy.run_module(argument_words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [command_word, *argument_words]
            sys.path.insert(0, str(Path(command_word).parent))
            runpy.run_path(command_word, run_name="__main__")
    except SystemExit as ended:
        sys.stdout.flush()
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return {"status": ended.code if isinstance(ended.code, int) else int(ended.code is not None)}
    finally:
        sys.argv, sys.path[:] = argv_before, import_paths
    return {"status": 0}

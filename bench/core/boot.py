"""Answers requests in a child process, which `process.py` starts: `python -P boot.py [--tree TREE HARNESS] MODULE...`.

The process imports every MODULE.  The last MODULE has a function `answer`, which answers requests, and may have a
function `start`, which runs first.  Requests and answers are lines of JSON on standard input and output.  An iterator
gives one line per value, and a last line `null`.  With `--tree` the kernels come from the folder TREE, and `bench` from
the folder HARNESS.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain
from pathlib import Path
from typing import IO, Any

Json = Any  # as in `base/plain.py`: an import would come before the trees are chosen
READY_LINE = "ready\n"
"""The first line of output.  It says that all modules are imported."""
HARNESS_PACKAGES = ("bench", "engine")
MEASURED_PACKAGES = ("kernels", "reference", "roofline")


class OnlyHere:
    """Finds modules of `rooflab` only in the folders that `make_namespace` sets.

    Without this class, Python would find a missing module in an editable installation of Rooflab."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Returns the import spec of a module of `rooflab`.  Returns None for a module of any other package.  Raises
        `ModuleNotFoundError` if `rooflab` has no such module here."""
        if not name.startswith("rooflab."):
            return None
        module_spec = PathFinder.find_spec(name, path)
        if module_spec is None:
            raise ModuleNotFoundError(f"No module named {name!r} in this tree", name=name)
        return module_spec


def make_namespace(tree: Path, harness: Path) -> None:
    """Builds the package `rooflab` from `tree` (`kernels`, `reference`, `roofline`) and `harness` (`bench`, `engine`).

    Call this before any import of `rooflab`.  Otherwise Python imports an installed Rooflab, or another revision."""
    root_package = types.ModuleType("rooflab")
    root_package.__path__ = []
    sys.modules["rooflab"] = root_package
    for folder, package_root in [
        *((name, tree) for name in MEASURED_PACKAGES),
        *((name, harness) for name in HARNESS_PACKAGES),
    ]:
        namespace_module = types.ModuleType(f"rooflab.{folder}")
        namespace_module.__path__ = [str(package_root / folder)]
        sys.modules[f"rooflab.{folder}"] = namespace_module
        setattr(root_package, folder, namespace_module)
    sys.meta_path.insert(0, OnlyHere())


def serve(answer: Callable[[Json], Json], lines: IO[str], answers: IO[str]) -> None:
    """Answers the requests in `lines` until `lines` ends.  If `lines` ends during an answer, the parent process is
    dead. Then this process kills itself and all processes that it started."""
    requests: queue.Queue[str | None] = queue.Queue()
    idle_event = threading.Event()
    idle_event.set()

    def read() -> None:
        for request_line in lines:
            idle_event.clear()
            requests.put(request_line)
        if not idle_event.is_set():
            _end_everything()
        requests.put(None)

    threading.Thread(target=read, daemon=True).start()
    answers.write(READY_LINE)
    answers.flush()
    while (request_line := requests.get()) is not None:
        answer_result = answer(json.loads(request_line))
        answer_values = chain(answer_result, [None]) if isinstance(answer_result, Iterator) else [answer_result]
        for answer_value in answer_values:
            answers.write(json.dumps(answer_value) + "\n")
            answers.flush()
        idle_event.set()


def _end_everything() -> None:
    from rooflab.bench.core.process import family, kill_all

    kill_all(family(os.getpid())[1:])
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(words: Sequence[str]) -> None:
    """Imports the modules, and then answers requests until standard input ends."""
    # Answers have a separate descriptor, because imports, kernels and compilers may print to standard output.
    answer_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if words[0] == "--tree":
        make_namespace(Path(words[1]), Path(words[2]))
        words = words[3:]
    worker_modules = [import_module(name) for name in words]
    getattr(worker_modules[-1], "start", lambda: None)()
    serve(worker_modules[-1].answer, sys.stdin, answer_stream)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The module `rooflab_faults` of a copy's processes: a plugin of pytest, and the tracing of child processes.

`faults.py` copies it into the copy's .venv, where a .pth file imports it at the start of each process that is traced.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

from pluggy import HookimplMarker

LAYERS = ("reference", "kernels", "engine", "roofline", "bench")
DATA, REPORT, ONLY = "ROOFLAB_FAULTS_DATA", "ROOFLAB_FAULTS_REPORT", "ROOFLAB_FAULTS_ONLY"
"""Environment variables: the folder of the traced lines, the file of outcomes, and the file of the chosen tests."""
SHARED = " | shared"
"""The end of a context's name if all tests of its file may depend on the code that ran, in a fixture or in a server."""
tracing: Any = None


def trace() -> None:
    """Starts to trace when a process starts; the lines count for the test whose name is in the file `now`."""
    global tracing
    from importlib import import_module

    folder = Path(os.environ[DATA])
    sources = [str(folder.parent / "tree-0" / layer) for layer in LAYERS]
    tracing = import_module("coverage").Coverage(
        data_file=str(folder / "lines"), data_suffix=True, source=sources, config_file=False, messages=False
    )
    tracing.set_option("run:sigterm", True)
    tracing.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
    tracing.start()
    if _now():
        tracing.switch_context(_now() + SHARED)
    atexit.register(tracing.save)
    atexit.register(tracing.stop)


def _now() -> str:
    return (Path(os.environ[DATA]) / "now").read_text()


def asked(answer: Any, request: Any) -> Any:
    """Notes what each test reached in a child that answers many tests (`bench/core/boot.py`): it may be killed."""
    if tracing is None:
        return answer(request)
    tracing.switch_context(_now())
    result = answer(request)
    tracing.save()
    return result


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keeps only the chosen tests, in their order."""
    if ONLY in os.environ:
        rank = {name: place for place, name in enumerate(Path(os.environ[ONLY]).read_text().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in rank), key=lambda item: rank[item.nodeid])


def pytest_runtest_logstart(nodeid: str) -> None:
    if tracing is not None:
        (Path(os.environ[DATA]) / "now").write_text(nodeid)
        tracing.switch_context(nodeid)


@HookimplMarker("pytest")(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Any:
    if tracing is None or fixturedef.scope == "function":
        return (yield)
    tracing.switch_context(_now() + SHARED)
    try:
        return (yield)
    finally:
        tracing.switch_context(_now())


def pytest_runtest_logreport(report: Any) -> None:
    """Writes a line for each phase of a test, so that a run that is ended still has results."""
    with Path(os.environ[REPORT]).open("a") as file:
        file.write(json.dumps([report.nodeid, report.when, report.outcome, report.duration]) + "\n")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        with Path(os.environ[REPORT]).open("a") as file:
            file.write(json.dumps([report.nodeid, "collect", "failed", 0.0]) + "\n")

"""Runs a program in this process with an emulated GPU, and writes a report.  Started by `strangers.run`."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rooflab.bench.emulate.ours import emulating
from rooflab.bench.emulate.strangers import Part, StrangersProgram
from rooflab.bench.emulator import Emulation, EmulationError, users_part
from rooflab.kernels._files import write_whole

COMPILE_MARK = "torch.compile compiled nothing: its function ran as it stands, its torch operators on the CPU"
WORKERS_MARK = "pytest-xdist was turned off: all tests ran in one process"


class LaunchWatch:
    """Divides the launches of a run into parts, one for each test or for the script."""

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.parts: list[Part] = []

    @contextmanager
    def part(self, name: str) -> Iterator[Part]:
        """Records what is launched and found inside a `with` block, as the part `name`."""
        part, emulation = Part(name), self.emulation
        launched_before = emulation.launched
        try:
            yield part
        finally:
            part.launched = emulation.launched - launched_before
            for finding in emulation.findings:
                (part.errors if finding.severity == "error" else part.notes).append(str(finding))
            for kept in (emulation.failed, emulation.results, emulation.fresh):  # they hold much memory
                kept.clear()
            self.parts.append(part)


class Plugin:
    """A pytest plugin that watches each test."""

    def __init__(self, watch: LaunchWatch) -> None:
        self._watch = watch
        self._ran: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Turns pytest-xdist off, whose processes would have no GPU."""
        if getattr(config.option, "dist", "no") != "no":
            config.option.dist, config.option.tx, config.option.numprocesses = "no", [], None
            self._watch.emulation.marks[WORKERS_MARK] += 1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Watches imports, which may launch kernels too."""
        with self._watch.part("imports") as part:
            result = yield
        if not part.launched:
            self._watch.parts.remove(part)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watches one test with its fixtures.  Leaves out a test that was skipped."""
        with self._watch.part(item.nodeid) as part:
            result = yield
        if item.nodeid not in self._ran and not part.launched:
            self._watch.parts.remove(part)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        """Ends the traceback of a kernel's fault in the program's own line."""
        try:
            return (yield)
        except EmulationError as error:
            raise error.with_traceback(users_part(error.__traceback__)) from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remembers the tests that ran."""
        if not report.skipped and report.when == "call":
            self._ran.add(report.nodeid)


def _script(words: list[str], watch: LaunchWatch, is_module: bool) -> int:
    """Runs a script or a module as `__main__`, and returns its exit status. Prints the traceback of an error."""
    sys.argv = words
    with watch.part(words[0]):
        try:
            if is_module:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException as error:  # whatever ends the program, its report is written
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
                frames = frames.tb_next
            traceback.print_exception(type(error), error, frames)
            return 1
    return 0


def main(request: Mapping[str, Any]) -> int:
    """Runs the program of a request, writes the report, and returns the program's exit status."""
    program = StrangersProgram(**request["program"])
    if program.imports_here:
        sys.path.insert(0, os.getcwd())
    elif program.kind == "script":
        sys.path.insert(0, str(Path(program.words[0]).resolve().parent))

    def compile_nothing(model: Any = None, **options: Any) -> Any:
        emulation.marks[COMPILE_MARK] += 1
        return model if model is not None else lambda function: function

    with emulating(**request["options"]) as emulation:
        watch = LaunchWatch(emulation)
        with patch.object(torch, "compile", compile_nothing):
            if program.kind == "pytest":
                status = int(pytest.main(program.words, plugins=[Plugin(watch)]))
            else:
                status = _script(program.words, watch, program.kind == "module")
    report = {"status": status, "parts": [vars(part) for part in watch.parts], "marks": dict(emulation.marks)}
    write_whole(Path(request["report"]), json.dumps(report, allow_nan=False))
    return status


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

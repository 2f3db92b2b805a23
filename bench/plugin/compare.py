"""A comparison with a baseline that fails where a benchmark of the baseline is missing from the run.

pytest-benchmark compares what happens to be in both: a test that was renamed, deleted or skipped passes, and so does a
run of which nothing is in the baseline.  It warns of another machine itself, and fails on a regression itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest


def asked_for(config: pytest.Config) -> str | None:
    """The option that asks for a comparison, the stricter one first."""
    if config.getoption("benchmark_compare_fail", None):
        return "--benchmark-compare-fail"
    return "--benchmark-compare" if config.getoption("benchmark_compare", None) else None


@dataclass(eq=False)  # pytest 8 keeps plugins in a set
class Comparison:
    """Watches one run, and fails it where the comparison that was asked for did not take place.  A pytest plugin."""

    config: pytest.Config
    asked: str
    wanted: set[str] = field(default_factory=set)
    """Every name in the baselines."""
    baselines: int = 0
    deselected: set[str] = field(default_factory=set)
    ours: set[str] = field(default_factory=set)
    """Deselected by `--benchmark`, which takes no benchmark for another test."""
    fates: dict[str, str] = field(default_factory=dict)
    """What became of tests that were not measured."""
    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(self, compared_benchmark: Mapping[str, Any]) -> None:
        """Takes note of a baseline."""
        self.baselines += 1
        self.wanted |= {str(entry["fullname"]) for entry in compared_benchmark["benchmarks"]}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Takes note of what the command line leaves out."""
        self.deselected |= {item.nodeid for item in items} - self.ours

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes note of why a test is not measured."""
        if report.skipped:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.fates[report.nodeid] = f"skipped: {text.removeprefix('Skipped: ')}"
        elif report.failed:
            self.fates[report.nodeid] = "failed"
        else:
            self.fates.setdefault(report.nodeid, "ran, and measured nothing")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails the run on a fault."""
        self._judge()
        if self.faults and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _judge(self) -> None:
        benchmarks: Any = self.config._benchmarksession  # type: ignore[attr-defined]
        measured = {str(entry.fullname) for entry in benchmarks.benchmarks if not entry.has_error}
        compared = self.wanted & measured
        missing = [
            name
            for name in sorted(self.wanted - measured - self.deselected)
            if name in self.fates or self._is_asked_for(name)
        ]
        files = f"{self.baselines} baseline{'s' if self.baselines > 1 else ''}"
        new = len(measured - self.wanted)
        if compared:
            self.lines.append(f"compared {len(compared)} with {files}" + (f"; {new} more are in none" if new else ""))
        self.lines += [f"MISSING {name}: {self.fates.get(name, 'not there: renamed or removed')}" for name in missing]
        if missing:
            self.faults.append(f"{len(missing)} of {len(self.wanted)} in the baseline are missing from this run")
        if not compared:
            self.faults.append(f"nothing was compared: {self._why_nothing(bool(benchmarks.disabled), bool(measured))}")

    def _is_asked_for(self, name: str) -> bool:
        """Whether the command line asks for the test `name`, which was not found.

        Nothing says whether `-k`, `--deselect`, `--ignore` or a node id would have taken it: then it is not missing.
        """
        if any(self.config.getoption(option, None) for option in ("keyword", "deselect", "ignore", "ignore_glob")):
            return False
        file = self.config.rootpath / name.partition("::")[0]
        asked = [(self.config.invocation_params.dir / argument).resolve() for argument in self.config.args]
        return any(path in (file, *file.parents) for path in asked)

    def _why_nothing(self, disabled: bool, measured: bool) -> str:
        if not self.baselines:
            named = self.config.getoption("benchmark_compare", None)
            which = f" {named!r}" if isinstance(named, str) else ""
            return f"there is no baseline{which}; save one with --benchmark-autosave"
        if disabled:
            return "benchmarks are not timed in this run"
        return "nothing that was measured is in the baseline" if measured else "nothing was measured"

    @pytest.hookimpl(tryfirst=True)  # pytest-benchmark ends the summary with an exception on a regression
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints what was compared, what is missing, and why the run fails."""
        terminalreporter.section("rooflab: comparison with the baseline")
        for line in self.lines:
            terminalreporter.write_line(line)
        for fault in self.faults:
            terminalreporter.write_line(f"FAILED {self.asked}: {fault}", red=True)

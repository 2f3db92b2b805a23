"""A comparison with a baseline that passes only where everything was compared, on the machine that it was read on.

pytest-benchmark compares what happens to be in both: a test that was renamed, deleted or skipped passes, and so does a
run of which nothing is in the baseline, or a baseline of another GPU, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from rooflab.bench.plugin import private as plugin_private
from rooflab.bench.plugin.selection import left_out
from rooflab.bench.records.methods import paired_method_of

KEY = "rooflab"
"""Where pytest-benchmark's JSON holds what this plugin adds: in `machine_info`, and at the top."""
SAME = ("machine_key", "threads")
"""What must be the same for two times to be compared, beside the GPU."""
NOT_OF_THE_KIND = ("uuid",)
"""Tells one card from another of the same kind."""


def asked_for(config: pytest.Config) -> str | None:
    """The option that asks for a comparison, the stricter one first."""
    if config.getoption("benchmark_compare_fail", None):
        return "--benchmark-compare-fail"
    return "--benchmark-compare" if config.getoption("benchmark_compare", None) else None


def differences(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """In what the machine of a baseline is another than this one; both are `machine_info["rooflab"]`."""
    if then is None:
        return ["the baseline says nothing of its machine; save it with --benchmark"]
    return [
        f"{name}: {_text(before)} in the baseline, {_text(after)} here"
        for name, before, after in _pairs(then, now)
        if before != after
    ]


def _pairs(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    before, after = then.get("gpu"), now.get("gpu")
    if bool(before) != bool(after):
        yield "gpu", before and before.get("name"), after and after.get("name")
    elif before and after:
        for name in dict.fromkeys((*before, *after)):
            if name not in NOT_OF_THE_KIND:
                yield f"gpu {name}", before.get(name), after.get(name)
    for name in SAME:
        yield name, then.get(name), now.get(name)


def _methods(extra: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """How each was timed, by name, where its `extra_info` says so; a test of plain pytest-benchmark does not."""
    timed = {name: info for name, info in extra.items() if info.get("timer")}
    return {name: paired_method_of(info["timer"], info.get("l2_state")) for name, info in timed.items()}


def _text(value: Any) -> str:
    return "none" if value is None else repr(value)


@dataclass(eq=False)  # pytest 8 keeps plugins in a set
class Comparison:
    """Watches one run, and fails it where the comparison that was asked for did not take place.  A pytest plugin."""

    config: pytest.Config
    asked: str
    wanted: set[str] = field(default_factory=set)
    """Every name in the baselines, less those that the newest says were skipped."""
    elsewhere: list[str] = field(default_factory=list)
    """In what the baselines' machines are others."""
    methods: dict[str, str] = field(default_factory=dict)
    """How the newest baseline was timed, by name, where it says so."""
    baselines: int = 0
    deselected: set[str] = field(default_factory=set)
    ours: set[str] = field(default_factory=set)
    """Deselected by `--benchmark`, which takes no benchmark for another test."""
    fates: dict[str, str] = field(default_factory=dict)
    """What became of tests that were not measured."""
    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(
        self, machine_info: Mapping[str, Any], compared_benchmark: Mapping[str, Any]
    ) -> None:
        """Takes note of a baseline, oldest first."""
        self.baselines += 1
        self.wanted |= {str(entry["fullname"]) for entry in compared_benchmark["benchmarks"]}
        extra = {str(entry["fullname"]): entry.get("extra_info", {}) for entry in compared_benchmark["benchmarks"]}
        self.methods |= _methods(extra)
        self.wanted -= set(compared_benchmark.get(KEY, {}).get("skipped", ()))
        found = differences(compared_benchmark["machine_info"].get(KEY), machine_info[KEY])
        self.elsewhere += [line for line in found if line not in self.elsewhere]

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
        state = plugin_private.session(self.config)
        compared = self.wanted & state.measured
        missing = {
            name: self.fates.get(name, "not there: renamed or removed")
            for name in sorted(self.wanted - state.measured - self.deselected)
            if name in self.fates or not left_out(self.config, name)
        }
        files = f"{self.baselines} baseline{'s' if self.baselines > 1 else ''}"
        new = len(state.measured - self.wanted)
        if compared:
            self.lines.append(f"compared {len(compared)} with {files}" + (f"; {new} more are in none" if new else ""))
        self.lines += [f"MISSING {name}: {fate}" for name, fate in missing.items()]
        self.lines += [f"ELSEWHERE {line}" for line in self.elsewhere]
        now = _methods(state.extra)
        otherwise = [name for name in sorted(compared & now.keys()) if self.methods.get(name, now[name]) != now[name]]
        self.lines += [f"OTHERWISE {name}: timed by {self.methods[name]}, here by {now[name]}" for name in otherwise]
        if missing:
            self.faults.append(f"{len(missing)} of {len(self.wanted)} in the baseline are missing from this run")
        if not compared:
            self.faults.append(f"nothing was compared: {self._why_nothing(state)}")
        if self.elsewhere and self.asked == "--benchmark-compare-fail":
            self.faults.append("the baseline is of another machine")
        if otherwise and self.asked == "--benchmark-compare-fail":
            self.faults.append(f"{len(otherwise)} of {len(compared)} were timed otherwise in the baseline")

    def _why_nothing(self, state: plugin_private.Session) -> str:
        if not self.baselines:
            named = self.config.getoption("benchmark_compare", None)
            which = f" {named!r}" if isinstance(named, str) else ""  # it takes a path that follows it for its own
            return f"there is no baseline{which}; save one with --benchmark-autosave"
        if state.disabled:
            return "benchmarks are not timed in this run"
        return "nothing was measured" if not state.measured else "nothing that was measured is in the baseline"

    @pytest.hookimpl(tryfirst=True)  # pytest-benchmark ends the summary with an exception on a regression
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints what was compared, what is missing, and why the run fails."""
        terminalreporter.section("rooflab: comparison with the baseline")
        for line in self.lines:
            terminalreporter.write_line(line)
        for fault in self.faults:
            terminalreporter.write_line(f"FAILED {self.asked}: {fault}", red=True)

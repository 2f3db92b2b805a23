"""The process in which one entry runs: it compiles, emulates and judges."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compatibility import own, sources
from compatibility.entries import Project, judged, largest, made, outputs
from compatibility.faults import Fault
from rooflab.bench.emulate.ours import emulating
from rooflab.bench.emulator import EmulationError, LaunchResult
from rooflab.bench.emulator.faults import Finding

_FILES = ("__init__", "entries", "faults", "own", "page", "sources", "worker")


@cache
def projects() -> dict[str, Project]:
    """The projects by the name of their file here."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    package = __name__.rpartition(".")[0]
    return {name: importlib.import_module(f"{package}.{name}").PROJECT for name in names if name not in _FILES}


class _Timed(list[LaunchResult]):
    """Results, and when each came: between two lie the compiler and the emulator."""

    def __init__(self) -> None:
        super().__init__()
        self.at = [_now()]

    def append(self, value: LaunchResult) -> None:
        super().append(value)
        self.at.append(_now())


def _now() -> float:
    """Seconds without those of imports of outside packages."""
    return time.perf_counter() - sources.importing_s


def _lines(finding: Finding) -> tuple[str, ...]:
    places = ((finding.file, finding.line), (finding.other_file, finding.other_line))
    lines = (f"{Path(file).name}:{line}" for file, line in places)
    return *lines, *(finding.belongs.split() if finding.belongs else ())


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one entry: `{"kernels": [...], "error", "wrong"}`, or `"refused"` with what the emulator said."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    project = (projects() | own.OWN)[request["project"]]
    entry = next(each for each in project.entries if each.name == request["entry"])
    project.source.fetched()
    inputs = made(entry.inputs)
    results, refused, held, stopped = _Timed(), "", [], []
    fault = Fault(request["fault"]) if request.get("fault") else None
    with emulating(configs=entry.configs, seed=request.get("seed", 0)) as run:
        run.results = results
        if fault is not None:
            fault.plant_in(run)
        try:
            held = outputs(entry.call, inputs, entry.grad)
        except EmulationError as error:
            refused, stopped = str(error), [error.fault]
    kernels: dict[str, dict[str, Any]] = {}
    for result, began, end in zip(results, results.at, results.at[1:], strict=False):
        file = next((name for name, line in result.lines if line), "")
        blank = {"kernel": result.kernel, "file": Path(file).name, "seconds": 0.0, "races": [], "notes": []}
        row = kernels.setdefault(result.kernel, blank)
        row["seconds"] = round(row["seconds"] + end - began, 2)
        row["races"] += [text for text in result.races if text not in row["races"]]
        row["notes"] += [text for text in result.notes if text not in row["notes"]]
    found: dict[str, Any] = {"kernels": list(kernels.values()), "refused": refused}
    if fault is not None:
        findings = [each for result in results for each in result.findings] + stopped
        named = [each for each in findings if each.rule in fault.rules]
        found |= {"planted": fault.planted, "line": fault.line, "rule": named[0].rule if named else ""}
        found["said"] = named[0].text if named else ""
        found["names_line"] = any(fault.line in _lines(each) for each in named)
    if fault is not None and request["project"] in own.OWN:
        with emulating() as unchanged:
            outputs(entry.call, inputs, entry.grad)
        found["unchanged"] = [str(each) for each in unchanged.findings]
    if not refused:
        stats = judged(entry, held, inputs)
        found["wrong"] = [each.describe() for each in stats if not each.passed]
        found |= {} if fault is not None else {"error": largest(stats)}
    return found

"""Runs in a child process: loads one version of a user's file, and says piece by piece what is known of its kernel.

A child serves one version, because a kernel may hang or end its process.  A piece has fields of the page's state.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import torch

from rooflab.bench.base.plain import JsonObject, Row
from rooflab.bench.compile.cases import COMPILED_BACKENDS, KernelCase, device_for, largest_case
from rooflab.bench.compile.pretended import pretended_card
from rooflab.bench.compile.static import own_compilers
from rooflab.bench.compile.static_rows import compile_targets
from rooflab.bench.core import NOT_RUN, Checkers, CheckTask, Measurement, Pool, Settings, default_scheme, pick_device
from rooflab.bench.emulate import calls, pool
from rooflab.bench.predict.explain import explain
from rooflab.bench.predict.predictions import choose_targets
from rooflab.bench.predict.public import band, kind_of
from rooflab.kernels import _card, registry
from rooflab.kernels.registry import CPU_BACKENDS, Kernel, get_op
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import Device
from rooflab.roofline.model import Cost
from rooflab.roofline.published import committed, times_of

DEVICE, EMULATORS = pick_device(None), pool({}, "rooflab.bench.watch.preload")
LOST = re.compile("TIMEOUT|its process ended")  # such a check cost a process; the later cells are not tried


@dataclass
class SavedKernel:
    """One version of a watched kernel, with what is known so far of its cells (a case in a scheme)."""

    kernel: Kernel
    case: list[str]
    """The case of `--case` for counts, compiled code and time; empty lets each choose its own."""
    gpu: Device
    limit_s: float
    cells: list[Row]
    emulated: tuple[str, str] = "", ""  # status and reason

    @classmethod
    def load(cls, file: str, kernel: str | None, case: str | None, gpu: str, limit_s: float) -> SavedKernel:
        """Imports the file.  Raises `ValueError` if it cannot be imported, or has not one kernel of this name."""
        kernels = registry.load_file(Path(file))
        named = [item for item in kernels if kernel in (None, item.name, item.id)]
        if len(named) != 1:
            ids = ", ".join(item.id for item in kernels)
            raise ValueError(f"kernel: expected --kernel with one of {ids}, got {kernel or 'none'}")
        spec = get_op(named[0].op)
        cases = dict.fromkeys((*spec.cases_in("smoke"), *spec.cases_in("edge")))
        cells = [{"case": c.id, "scheme": s, "status": "", "reason": ""} for c in cases for s in spec.schemes]
        return cls(named[0], [case] if case else [], device_for(gpu), limit_s, cells)

    def pieces(self) -> Iterator[Row]:
        """Yields what is known, the fastest first.  Raises `ValueError` if the process of the emulator fails."""
        yield {"kernel": self.kernel.id, "backend": self.kernel.backend, "cells": self.cells}
        if self.kernel.has_code:
            yield self._emulated() | self._verdict()
            own_compilers().begin()
        is_timed = DEVICE.type == "cuda" or self.kernel.backend in CPU_BACKENDS
        for place, cell in enumerate(self.cells):
            yield self._checked(cell) | self._verdict()
            if LOST.search(cell["status"] + cell["reason"]):
                return
            if place == 0 and self.kernel.has_code:
                yield {"compiled": self._compiled()}
            if place == 0 and is_timed and cell["status"] == "OK":
                yield {"measured": self._measured()}

    def _command(self, command: str, **options: str) -> str:
        words = [f"--{name} {quote(value)}" for name, value in options.items()]
        return " ".join(["rooflab", command, self.kernel.op, "--kernel", quote(str(self.kernel.file)), *words])

    def _verdict(self) -> Row:
        """Returns the fields that say whether the kernel is right so far, with the first fault in one sentence."""
        tried = [cell for cell in self.cells if cell["status"] and cell["status"] not in NOT_RUN]
        wrong = [cell for cell in tried if cell["status"] != "OK"]
        faults = [": ".join(self.emulated)] if self.emulated[0] not in ("", "OK", *NOT_RUN) else []
        faults += [f"{cell['case']} {cell['scheme']}: {cell['status']}: {cell['reason']}" for cell in wrong]
        word = "wrong" if faults else "right" if tried or self.emulated[0] == "OK" else ""
        return {"verdict": word, "sentence": "".join(faults[:1])}

    def _emulated(self) -> Row:
        (target,) = calls.choose(self.kernel.op, [self.kernel.name], self.case, [], None)
        EMULATORS.limit_s = 2 * self.limit_s
        answer = calls.ask(calls.request_of(target, None, seed=0, schedule=0, races=True), EMULATORS)
        counts, moved = defaultdict[int, Counter[str]](Counter), Counter[str]()
        for launch in answer["launches"]:
            moved.update(launch["bytes"])
            for file, line, line_counts in launch["lines"]:
                if file and Path(file).resolve() == self.kernel.file:
                    counts[line].update(line_counts)
        self.emulated = answer["status"], answer["reason"]
        options = {"case": target.case.id, "scheme": target.scheme.name}
        counted = {
            **options,
            "lines": {row["line"]: row for row in calls.line_rows([], counts)} if counts else {},
            "levels": calls.level_rows(moved) if moved else [],
            "bytes": moved["hbm_read"] + moved["hbm_write"],
            "least": _least(target).bytes,
            "command": self._command("emulate", **options) + " --lines",
        }
        findings = [f"{finding['severity']} [{finding['rule']}]: {finding['text']}" for finding in answer["findings"]]
        return {"emulated": counted, "findings": findings}

    def _checked(self, cell: Row) -> Row:
        is_first = cell["case"] == self.cells[0]["case"]  # it has all additional runs, and the others may be larger
        case, scheme = get_op(self.kernel.op).check_case(Case.parse(cell["case"])), get_scheme(cell["scheme"])
        emulators = EMULATORS if DEVICE.type == "cpu" else None
        checkers = Checkers(DEVICE, emulators, (2 if is_first else 10) * self.limit_s)
        result = checkers(CheckTask(self.kernel, case, scheme, 0, is_first))
        command = self._command("check", case=cell["case"], scheme=scheme.name)
        cell |= {"status": result.status, "reason": result.reason, "command": command}
        return {"cells": self.cells}

    def _compiled(self) -> Row:
        targets, device = choose_targets(self.kernel.op, [self.kernel.name], self.case, []), self.gpu
        options = {"case": targets[0].case.id, "scheme": targets[0].scheme.name}
        commands = [self._command("static", **options), self._command("explain", **options, gpu=device.name)]
        row: Row = {**options, "gpu": device.name, "commands": commands}
        (result,), (entry,) = compile_targets(targets, device, None), explain(targets, device)
        if result.launches:
            row["registers"] = max(launch.registers for launch in result.launches)
            row["spills"] = max(launch.stack_bytes for launch in result.launches)
        if entry.predicted_ms is not None:
            ends = band(kind_of(self.kernel.op, _least(targets[0])))
            row["predicted_ms"] = [entry.predicted_ms * end for end in ends]
        row |= {"bound_ms": entry.bound_ms, "limiter": entry.limiter, "calibration": entry.calibration}
        row["published"] = _published(targets[0], device.name)
        return row | {"reason": str(result.failure or entry.reason)}

    def _measured(self) -> Row:
        spec, suite = get_op(self.kernel.op), "smollm2_135m" if DEVICE.type == "cpu" else "llama3_8b"
        scheme = get_scheme(default_scheme(DEVICE, spec))
        cases = [spec.check_case(Case.parse(text)) for text in self.case] or spec.cases_in(suite)
        case = largest_case(spec, cases, scheme)
        peers = [item for item in registry.kernels(spec.name).values() if item.role == "library"]
        names = frozenset(item.name for item in (self.kernel, *peers))
        measurement = Measurement(spec, scheme, Settings(device=str(DEVICE), roof=False), planted_before=names)
        columns = ("kernel", "latency_median_ms", "status", "reason")
        records = measurement.records((self.kernel, *peers), [case])
        times = [{name: getattr(record, name) for name in columns} for record in records]
        options = {"case": case.id, "scheme": scheme.name}
        return {**options, "device": DEVICE.type, "times": times, "command": self._command("bench", **options)}


def _least(target: KernelCase) -> Cost:
    spec = get_op(target.op)
    return spec.cost_of(spec.make_inputs(target.case, target.scheme, torch.device("meta"), 0))


def _published(target: KernelCase, gpu: str) -> list[Row]:
    """Returns the published times of the case: on the GPU, or else on the first other GPU that has one."""
    for name in dict.fromkeys((gpu, *(table.gpu for table in committed()))):
        if times := times_of(target.op, target.scheme.name, target.case, name):
            libraries = [f"{one.table.framework} {one.table.version}, {one.how}" for one in times]
            return [{"library": x, "gpu": name, "s": one.seconds} for x, one in zip(libraries, times, strict=True)]
    return []


def start() -> None:
    """Starts the processes that a version will need, and emulates a kernel, so that Triton's compiler is loaded."""
    backend = os.environ.get("ROOFLAB_WATCH_BACKEND", "")  # of the version before, or empty
    if DEVICE.type == "cpu":
        _card.make_fake_gpu = pretended_card
    if DEVICE.type == "cuda" or backend not in COMPILED_BACKENDS:
        Pool.of_kernels(DEVICE.type == "cpu").begin()
    if backend not in CPU_BACKENDS:
        (target,) = calls.choose("rmsnorm", ["fused"], [], [], None)
        calls.ask(calls.request_of(target, None, seed=0, schedule=0, races=True), EMULATORS)


def answer(request: JsonObject) -> Iterator[Row]:
    """Yields the pieces of the version that `SavedKernel.load` loads, or the sentence why there are none."""
    try:
        yield from SavedKernel.load(**request).pieces()
    except ValueError as error:
        yield {"verdict": "wrong", "sentence": str(error).removeprefix("kernel: ")}

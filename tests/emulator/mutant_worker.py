"""The process in which a kernel of the registry and its mutants are emulated; see `answer`."""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import ptx_worker  # noqa: F401  no further than PTX
import torch
from ptx_mutants import mutants

from rooflab.bench.core.poison import poisoned_allocations
from rooflab.bench.emulate.ours import every_launch
from rooflab.bench.emulator import Checks, EmulationError, Launches, PtxLaunch
from rooflab.kernels import _device, registry
from rooflab.reference.spec import Case, get_scheme

MOST_SECONDS = 60.0
"""Of the processor, for the first run."""
MOST_TIMES = 8
"""As long as the longest run of the kernel as it is: a mutant that spins for ever is stopped."""
LEAST_SECONDS = 2.0
CHECKS = Checks(counts=False)
INPUTS_SEED = 0


class TimedOut(Exception):
    """A run took longer than it may."""


class Registered:
    """A kernel of the registry on one case."""

    def __init__(self, request: Mapping[str, Any], case: str) -> None:
        self.spec, self.kernel = registry.get_op(request["op"]), registry.get_kernel(request["op"], request["kernel"])
        self.scheme, self.case = get_scheme(request.get("scheme", "bf16")), Case.parse(case)
        config = request.get("config")
        self.config = {} if config is None else {"config": self.kernel.tunable.make_config(config)}
        inputs = self._inputs()
        refused = self.kernel.why_not_here(torch.device("cpu")) or self.kernel.why_not_args(inputs)
        assert refused is None, f"{case}: {refused}"
        self.oracle = self.spec.oracle(inputs)

    def _inputs(self) -> dict[str, Any]:
        return self.spec.make_inputs(self.case, self.scheme, torch.device("cpu"), INPUTS_SEED)

    def wrong(self) -> str | None:
        """Launches it; what is wrong with its outputs."""
        inputs = self._inputs()
        given = {name: value for name, value in inputs.items() if name in self.kernel.accepted}
        if self.kernel.prepare is not None and self.spec.prepared is not None:
            given[self.spec.prepared] = self.kernel.prepare(given[self.spec.prepared])
        out = self.kernel.fn(**given, **self.config)
        if self.spec.mutates:
            out = tuple(inputs[name] for name in self.spec.outputs)
        outputs = out if isinstance(out, tuple) else (out,)
        judged = self.spec.judge(outputs, self.oracle, self._inputs(), self.scheme)
        return next((verdict.describe() for verdict in judged if not verdict.passed), None)


class Mutated(Launches):
    """Every launch of a request, with the text of one of them replaced."""

    def __init__(self) -> None:
        super().__init__(checks=CHECKS)
        self.mutated, self.text = -1, ""
        self.texts: list[str] = []
        self.longest = 0.0

    def run(self, compiled: Any, grid: tuple[int, ...], args: list[Any]) -> None:
        """Emulates one launch."""
        by_triton = not isinstance(compiled, PtxLaunch)
        self.texts.append(compiled.asm["ptx"] if by_triton else compiled.ptx)
        if len(self.texts) - 1 == self.mutated and by_triton:
            compiled = SimpleNamespace(metadata=compiled.metadata, src=compiled.src, asm={"ptx": self.text})
        elif len(self.texts) - 1 == self.mutated:
            compiled = dataclasses.replace(compiled, ptx=self.text)
        super().run(compiled, grid, args)

    def fault(self, wrong: Callable[[], str | None], seed: int, mutated: int = -1, text: str = "") -> str | None:
        """What is wrong with a run whose launch `mutated` has the PTX `text`; None where nothing is."""
        self.seed, self.mutated, self.text, self.texts, self.results = seed, mutated, text, [], []
        # The processor's seconds, which are the same on a busy machine.
        allowed = max(MOST_TIMES * self.longest, LEAST_SECONDS) if mutated >= 0 else MOST_SECONDS
        signal.setitimer(signal.ITIMER_PROF, allowed)
        began = time.process_time()
        try:
            # What nobody has written must not hold the right values of an earlier run.
            with poisoned_allocations(), self.fresh:
                found = wrong()
        except EmulationError as error:
            return f"error: {error}"
        except TimedOut:
            return "does not end"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if mutated < 0:
            self.longest = max(self.longest, time.process_time() - began)
        races = [*self.races, *self.notes]
        return f"race: {races[0]}" if races else f"wrong: {found}" if found else None


def judge(launches: Mutated, request: Mapping[str, Any]) -> dict[str, Any]:
    """`{"clean": [what is wrong with the kernel as it is], "mutants": [{"name", "line", "flagged"}]}`,
    where `flagged` says what is wrong with a mutant, or is None.

    A request has `op`, `kernel`, `config`, `scheme` and `cases` of the registry; the `seeds` of the mutants and
    `clean_seeds` of the kernel as it is; `only`, the names of the mutants to run, or None for all; `without`, a pattern
    of those to leave out; and `sms`, how many SMs a persistent kernel is laid over, so that a CTA has several tiles:
    the same for all requests of a process.  The names of mutants begin with the number of their launch where a call
    launches several kernels.
    """
    subjects = [Registered(request, case) for case in request["cases"]]
    clean, texts = [], []
    for subject in subjects:
        for seed in request["clean_seeds"]:
            clean += [fault for fault in [launches.fault(subject.wrong, seed)] if fault is not None]
        texts.append(launches.texts)
    assert all(own == texts[0] for own in texts), "the cases of one request have to be one kernel"
    # Launches of one text are one kernel's: its mutants stand in for the first of them.
    numbers: dict[str, int] = {}
    for number, text in enumerate(texts[0]):
        numbers.setdefault(text, number)
    chosen = [
        (number, f"{number}: {mutant.name}" if len(numbers) > 1 else mutant.name, mutant)
        for text, number in numbers.items()
        for mutant in mutants(text)
    ]
    found = []
    for number, name, mutant in chosen:
        if request.get("only") is not None and name not in request["only"]:
            continue
        if re.search(request.get("without", "$^"), name):
            continue
        runs = ((subject.wrong, seed) for seed in request["seeds"] for subject in subjects)
        faults = (launches.fault(wrong, seed, number, mutant.text) for wrong, seed in runs)
        flagged = next((fault for fault in faults if fault is not None), None)
        found.append({"name": name, "line": mutant.line, "flagged": flagged})
    return {"clean": clean, "mutants": found}


def _stop(number: int, frame: object) -> None:
    raise TimedOut


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What `judge` says."""
    # Before the first kernel is imported: modules take the number by its name.
    _device.HOPPER_SMS = request.get("sms", _device.HOPPER_SMS)
    signal.signal(signal.SIGPROF, _stop)
    launches = Mutated()
    with every_launch(launches):
        return judge(launches, request)

"""Runs a kernel of the registry and its mutants in the emulator: a process of its own, without TRITON_INTERPRET.

Reads one request as JSON on standard input and writes one answer on the output, `{"clean": [fault of the kernel as it
is], "mutants": [{"name", "line", "source_line", "flagged"}]}`, where `flagged` says why or is None.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping

import torch
from ptx_mutants import mutants

from rooflab.bench.code.targets import DEFAULT, get_target
from rooflab.bench.ptx.launch import Checks, Launch, emulate
from rooflab.bench.ptx.machine.errors import EmulationError
from rooflab.bench.ptx.triton_kernels import bound
from rooflab.bench.ptx.triton_launches import emulating_triton
from rooflab.kernels import registry
from rooflab.kernels.configs import make_config
from rooflab.reference.spec import Case, get_scheme

MOST_SECONDS = 60
"""Of one run: a mutant that spins for ever is stopped."""
CHECKS = Checks(counts=False)


class TimedOut(Exception):
    """A run took longer than `MOST_SECONDS`."""


class Subject:
    """A kernel of the registry on one case."""

    def __init__(self, request: Mapping[str, object], case: str) -> None:
        self.spec = registry.get_op(request["op"])
        self.kernel = registry.get_kernel(request["op"], request["kernel"])
        self.scheme = get_scheme(request.get("scheme", "bf16"))
        self.case = Case.parse(case)
        config = request.get("config")
        self.config = {} if config is None else {"config": make_config(self.kernel, config)}
        self.oracle = self.spec.oracle(self._inputs())

    def _inputs(self):
        return self.spec.make_inputs(self.case, self.scheme, torch.device("cpu"), 0)

    def texts(self) -> list[str]:
        """The PTX of each launch."""
        found: list[str] = []
        self._launch(self._inputs(), lambda number, launch, grid, values, reached: found.append(launch.ptx))
        return found

    def fault(self, seed: int, mutated: int = -1, text: str = "") -> str | None:
        """What is wrong with a run whose launch `mutated` has the PTX `text`; None where nothing is."""
        inputs, races = self._inputs(), []

        def run(number, launch, grid, values, reached):
            if number == mutated:
                launch = dataclasses.replace(launch, ptx=text)
            races.extend(emulate(launch, grid, values, checks=CHECKS, seed=seed, memory=reached).races)

        signal.alarm(MOST_SECONDS)
        try:
            outputs = self._launch(inputs, run)
        except EmulationError as error:
            return f"error: {error}"
        except TimedOut:
            return "does not end"
        finally:
            signal.alarm(0)
        if races:
            return f"race: {races[0]}"
        judged = self.spec.judge(outputs, self.oracle, self._inputs(), self.scheme)
        wrong = [verdict.describe() for verdict in judged if not verdict.passed]
        return f"wrong: {wrong[0]}" if wrong else None

    def _launch(self, inputs, run):
        launched = 0

        def handle(kernel, grid, args):
            nonlocal launched
            run(launched, *_bound(kernel, grid, args))
            launched += 1

        target = get_target(DEFAULT.name)
        with emulating_triton(target.sm, target.properties(), handle):
            given = {name: value for name, value in inputs.items() if name in self.kernel.accepted}
            out = self.kernel.fn(**given, **self.config)
        if self.spec.mutates:
            return tuple(inputs[name] for name in self.spec.outputs)
        return out if isinstance(out, tuple) else (out,)


def _bound(kernel, grid, args) -> tuple[Launch, tuple[int, ...], list[object], list[torch.Tensor]]:
    launch, values, reached = bound(kernel, grid, args)
    return launch, grid, values, reached


def answer(request: Mapping[str, object]) -> dict[str, object]:
    """What the module says."""
    subjects = [Subject(request, case) for case in request["cases"]]
    only = request.get("only")
    clean = [fault for subject in subjects for seed in request["clean_seeds"] if (fault := subject.fault(seed))]
    found = []
    for number, text in enumerate(subjects[0].texts()):
        assert all(subject.texts()[number] == text for subject in subjects), "the cases have PTX texts of their own"
        for mutant in mutants(text):
            name = f"{number}: {mutant.name}" if number else mutant.name
            if only is None or name in only:
                runs = ((subject, seed) for seed in request["seeds"] for subject in subjects)
                flagged = next((fault for subject, seed in runs if (fault := subject.fault(seed, number, mutant.text))), None)
                found.append({"name": name, "line": mutant.line, "source_line": mutant.source_line, "flagged": flagged})
    return {"clean": clean, "mutants": found}


def main() -> None:
    """One request, one answer."""

    def stop(number, frame):
        raise TimedOut

    signal.signal(signal.SIGALRM, stop)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(answer(json.load(sys.stdin)), channel)
    channel.close()


if __name__ == "__main__":
    main()

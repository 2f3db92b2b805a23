"""Starts the fresh processes of an A/B and reads what they say; one that dies or hangs costs one kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from rooflab.bench.ab.pairs import Reading, Readings, SideName
from rooflab.bench.ab.sides import ROOT, Comparison, Job, Mode, Side
from rooflab.bench.records.record import Status, now

BOOT = Path("bench/processes/boot.py")
WORKER = "rooflab.bench.ab.worker"
START_S = 180.0
"""Longest that a process may take to import torch and the kernels, on a machine that does other things."""
CHECK_S = 300.0
"""Longest check of one kernel."""
MEASURE_S = 60.0
"""Longest reading of one kernel beside its budget: compilation, inputs and the judging of its outputs."""
_STATUSES = frozenset(get_args(Status))


class ProcessFailed(RuntimeError):
    """A process ended, or was ended, before it had done its job."""


@dataclass
class Runner:
    """Runs jobs of one comparison."""

    comparison: Comparison
    device: str = "cpu"
    seed: int = 0
    budget_s: float = 0.3
    """Seconds for one kernel in one process."""
    timer: str | None = None
    judged: set[SideName] = field(default_factory=set)
    """Sides whose outputs after timing have been judged."""
    environments: dict[SideName, dict[str, Any]] = field(default_factory=dict)
    """What each side's first process said of the machine."""

    def measure(self, name: SideName, keys: Collection[str]) -> Readings:
        """`pairs.Measure`: one process that measures these, and another for the rest where one of them ends it."""
        found = self._run_all(name, "measure", keys, MEASURE_S + 10 * self.budget_s)
        self.judged.add(name)
        return found

    def check(self, name: SideName, keys: Collection[str]) -> Readings:
        """One process that checks these, and another for the rest where one of them ends it."""
        return self._run_all(name, "check", keys, CHECK_S)

    def list(self, name: SideName, ops: Collection[str], suite: str) -> dict[str, Any]:
        """Ops, kernels and cases of one side's tree.  Raises `ProcessFailed` where it cannot be imported."""
        side = self.comparison.side(name)
        job = Job("list", self.device, self.seed, 0.0, files=_texts(side), ops=tuple(ops), suite=suite)
        for line in _lines(side, job, CHECK_S):
            if "list" in line:
                found: dict[str, Any] = line["list"]
                return found
        raise ProcessFailed(f"{side.label}: the process listed nothing")

    def _run_all(self, name: SideName, mode: Mode, keys: Collection[str], limit_s: float) -> dict[str, Reading]:
        left = list(keys)
        found: dict[str, Reading] = {}
        while left:
            found |= self._run(name, mode, left, limit_s)
            after = [key for key in left if key not in found]
            if len(after) == len(left):
                break
            left = after
        return found

    def _run(self, name: SideName, mode: Mode, keys: Collection[str], limit_s: float) -> dict[str, Reading]:
        side = self.comparison.side(name)
        job = Job(
            mode=mode,
            device=self.device,
            seed=self.seed,
            budget_s=self.budget_s,
            targets={key: asdict(side.targets[key]) for key in keys if key in side.targets},
            files=_texts(side),
            slow_down=side.slow_down,
            functions=side.functions,
            timer=self.timer,
            judge=name not in self.judged,
        )
        found: dict[str, Reading] = {}
        at: str | None = None
        try:
            for line in _lines(side, job, limit_s):
                at = line.get("start", at)
                if "environment" in line:
                    self.environments.setdefault(name, line["environment"])
                elif "key" in line:
                    found[line["key"]] = _reading(line["reading"])
        except ProcessFailed as failed:
            timed_out = "longer than" in str(failed)
            blamed = [at] if at is not None and at not in found else [key for key in keys if key not in found]
            for key in blamed:
                found[key] = Reading("TIMEOUT" if timed_out else "RUNTIME_ERROR", f"{side.label}: {failed}")
        return found


def _texts(side: Side) -> tuple[str, ...]:
    return tuple(str(file) for file in side.files)


def _reading(values: Mapping[str, Any]) -> Reading:
    reading = Reading(**values)
    if reading.status not in _STATUSES:
        raise ProcessFailed(f"a process answered with the status {reading.status!r}")
    seconds, kernels = tuple(reading.seconds), tuple(reading.device_kernels)
    return replace(reading, timestamp=now(), seconds=seconds, device_kernels=kernels)


def _environment() -> dict[str, str]:
    # Not the interpreter's mode: a kernel that it runs has no time.  Hash seeds differ between processes on purpose.
    return {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONHASHSEED")}


def _lines(side: Side, job: Job, limit_s: float) -> Iterator[dict[str, Any]]:
    """The answers of one fresh process.  Raises `ProcessFailed` where it ends early or is silent for too long."""
    harness = side.tree if side.own_bench else ROOT
    command = [side.python, "-P", str(harness / BOOT)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, str(side.tree), str(harness), WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(),
            text=True,
            start_new_session=True,  # whatever it starts can then be ended with it
        )
        assert process.stdin is not None and process.stdout is not None, "Popen was given PIPE"
        silent = threading.Event()

        def end_it() -> None:
            if process.poll() is None:  # else it is dead, and what it has started holds its output open
                silent.set()
            _kill(process)

        ended = read = False
        waits_s = START_S
        try:
            timer = _start(waits_s, end_it)
            try:
                process.stdin.write(json.dumps(asdict(job)))
                process.stdin.close()
            except BrokenPipeError:
                pass  # it is dead: the loop below says why
            for text in process.stdout:
                timer.cancel()
                line = _parsed(text)
                if line is None:
                    break  # it died while it wrote: its status says more
                ended = "end" in line
                yield line
                if ended:
                    break
                waits_s = limit_s
                timer = _start(waits_s, end_it)
            read = True
        finally:
            timer.cancel()
            status = _status(process, patience_s=10.0 if read and not silent.is_set() else 0.0)
            process.stdout.close()
        if ended:
            return
        if silent.is_set():
            raise ProcessFailed(f"took longer than {waits_s:.0f} s, and was ended")
        raise ProcessFailed(f"its process ended with status {status}: {_last_line(log)}")


def _parsed(text: str) -> dict[str, Any] | None:
    """The answer in a line; None for one that is none, or that was cut short."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) else None


def _status(process: subprocess.Popen[str], patience_s: float) -> int:
    """The exit status of a process that has said all, or is no longer wanted; what it has started ends with it."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)  # before it is ended, which gives it another status
    _kill(process)
    return process.wait()


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process and whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _start(seconds: float, action: Any) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def _last_line(log: Any) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][-500:] if lines else "it said nothing"

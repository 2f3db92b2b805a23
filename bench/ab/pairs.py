"""Fresh processes of an A/B: starts them and reads them, in pairs of seeded ABBA order, within a budget of time.

A process that dies or hangs loses only the kernel that it ran.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rooflab.bench.ab.sides import Comparison, Job, Mode, Reading, Readings, Side, SideName
from rooflab.bench.core.process import Child, ChildFailed, TimedOut, command_for, environment_without
from rooflab.bench.core.record import Status, now
from rooflab.bench.core.system_time import time
from rooflab.roofline.numbers import counted

Measure = Callable[[SideName, Collection[str]], Readings]
"""Starts one process of a side, which measures these comparisons, and returns its readings by key."""


@dataclass
class Batch:
    """The result of a run of pairs, by comparison."""

    pairs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Medians (A, B) of each pair, in time order."""
    readings: list[tuple[int, SideName, str, Reading]] = field(default_factory=list)
    """Every reading with the number of its pair, its side and its key, in time order."""
    broken: dict[str, tuple[SideName, Reading]] = field(default_factory=dict)
    """The first reading of each comparison that was not OK; this comparison is not measured again.  A NOISY reading
    takes only its pair away, unless there is no other pair."""
    stopped: str = ""
    """Why the run has fewer pairs than the caller asked for."""


def orders(seed: int) -> Iterator[tuple[SideName, SideName]]:
    """The order of each pair: blocks of ABBA and BAAB, drawn from `seed`; a steady drift cancels within each block."""
    coin = random.Random(seed)
    while True:
        first: tuple[SideName, SideName] = ("A", "B") if coin.random() < 0.5 else ("B", "A")
        yield first
        yield first[1], first[0]


def run_pairs(
    measure: Measure,
    keys: Collection[str],
    pairs: int,
    *,
    seed: int = 0,
    deadline: float = math.inf,
    least: int = 0,
    later: int = 0,
    clock: Callable[[], float] = time.monotonic,
    done: Callable[[str], None] = lambda text: None,
) -> Batch:
    """Up to `pairs` pairs over `keys`.  A pair does not start if it would end after `deadline` (of `clock`), assuming
    that it takes as long as the longest pair so far.  It leaves time for `later` pairs.

    If `least` pairs and the later ones do not fit, the first pair is the last: the others could decide nothing.  A
    comparison whose reading is not OK leaves the run; the remaining comparisons continue.  A pair with a NOISY reading
    is not counted.
    """
    batch = Batch(pairs={key: [] for key in keys})
    order = orders(seed)
    longest = 0.0
    for number in range(pairs):
        alive = [key for key in keys if key not in batch.broken]
        began = clock()
        if not alive:
            break
        lacking = (least + later - number) * longest - (deadline - began)
        if number == 1 and lacking > 0:
            wanted = f"the {least + later} pairs that a verdict takes need {lacking:.0f} s more"
            batch.stopped = f"the budget is too short: at {longest:.1f} s a pair, {wanted}"
            break
        if number and began + (1 + later) * longest > deadline:
            batch.stopped = f"the budget ended after {number} of {pairs} pairs"
            break
        read: dict[SideName, Readings] = {}
        for side in next(order):
            read[side] = measure(side, alive)
            done(f"pair {number + 1} of {pairs}, side {side}")
        for key in alive:
            _keep(batch, number, key, read["A"], read["B"])
        longest = max(longest, clock() - began)
    _leave_noisy_out(batch)
    return batch


def _leave_noisy_out(batch: Batch) -> None:
    """Says how many pairs are not counted; a comparison of such pairs alone is broken."""
    noisy: dict[tuple[str, int], tuple[SideName, Reading]] = {}
    for number, side, key, reading in batch.readings:
        if reading.status == "NOISY" and key not in batch.broken:
            noisy.setdefault((key, number), (side, reading))
    for (key, _), found in noisy.items():
        if not batch.pairs[key]:
            batch.broken.setdefault(key, found)
    if noisy and not batch.stopped:
        reason = next(iter(noisy.values()))[1].reason
        batch.stopped = f"{counted(len(noisy), 'pair')} not counted, because a reading is NOISY: {reason}"


def _keep(batch: Batch, number: int, key: str, first: Readings, second: Readings) -> None:
    nothing = Reading("RUNTIME_ERROR", "the process gave no reading of it")
    medians = []
    noisy = False
    sides: tuple[tuple[SideName, Reading], ...] = (("A", first.get(key, nothing)), ("B", second.get(key, nothing)))
    for side, reading in sides:
        batch.readings.append((number, side, key, reading))
        fault = fault_of(reading)
        if reading.status == "NOISY":
            noisy = True
        elif fault is not None:
            batch.broken.setdefault(key, (side, fault))
        medians.append(reading.median_s)
    if key not in batch.broken and not noisy and medians[0] is not None and medians[1] is not None:
        batch.pairs[key].append((medians[0], medians[1]))


def fault_of(reading: Reading) -> Reading | None:
    """Why a reading cannot be compared: it is not OK, or no clock can show its time.  None if it can be compared."""
    if reading.status != "OK":
        return reading
    if reading.median_s is None:
        return Reading("INVALID", "no time was read")
    if not math.isfinite(reading.median_s) or not all(math.isfinite(value) for value in reading.seconds):
        return Reading("INVALID", "a sample is not a finite number")
    if reading.median_s <= 0 or any(value < 0 for value in reading.seconds):
        return Reading("INVALID", "the timer did not move while the kernel ran")
    return None


WORKER = "rooflab.bench.ab.worker"
CHECK_S = 300.0
"""Time limit for the check of one kernel, in seconds."""
MEASURE_S = 60.0
"""Time limit for one kernel's reading on top of its budget: compilation, inputs and judging the outputs; in seconds."""


@dataclass
class JobRunner:
    """Runs jobs of one comparison, each in a fresh process."""

    comparison: Comparison
    device: str = "cpu"
    seed: int = 0
    budget_s: float = 0.3
    """Seconds for one kernel in one process."""
    timer: str | None = None
    judged: set[SideName] = field(default_factory=set)
    """Sides whose outputs after timing have been judged."""
    environments: dict[SideName, dict[str, Any]] = field(default_factory=dict)
    """What the first process of each side said of the machine."""

    def measure(self, name: SideName, keys: Collection[str]) -> Readings:
        """`Measure`: one process measures these kernels; if a kernel ends it, another process measures the rest."""
        readings = self._run_all(name, "measure", keys, MEASURE_S + 10 * self.budget_s)
        self.judged.add(name)
        return readings

    def start_s(self) -> float:
        """Seconds of a process that measures nothing."""
        began = time.monotonic()
        self._run("A", "measure", [], MEASURE_S)
        return time.monotonic() - began

    def check(self, name: SideName, keys: Collection[str]) -> Readings:
        """One process checks these kernels; if a kernel ends the process, another process checks the rest."""
        return self._run_all(name, "check", keys, CHECK_S)

    def list(self, name: SideName, ops: Collection[str], suite: str, cases: Collection[str]) -> dict[str, Any]:
        """Ops, kernels and cases of one side's tree, and which of `cases` it has.

        Raises `ChildFailed` if the tree cannot be imported.
        """
        side = self.comparison.side(name)
        within = str(side.within or "")
        asked: dict[str, Any] = {"ops": tuple(ops), "suite": suite, "cases": tuple(cases)}
        job = Job("list", self.device, self.seed, 0.0, {}, _texts(side), within, **asked)
        answers = list(_answers(side, job, CHECK_S))
        listed: dict[str, Any] = next(answer["list"] for answer in answers if "list" in answer)
        return listed

    def _run_all(self, name: SideName, mode: Mode, keys: Collection[str], limit_s: float) -> Readings:
        left = list(keys)
        readings: dict[str, Reading] = {}
        while left:
            readings |= self._run(name, mode, left, limit_s)
            after = [key for key in left if key not in readings]
            if len(after) == len(left):
                break
            left = after
        return readings

    def _run(self, name: SideName, mode: Mode, keys: Collection[str], limit_s: float) -> dict[str, Reading]:
        """The readings that one process finished; the kernel that ended the process gets a failure as its reading."""
        side = self.comparison.side(name)
        job = Job(
            mode=mode,
            device=self.device,
            seed=self.seed,
            budget_s=self.budget_s,
            targets={key: asdict(side.targets[key]) for key in keys if key in side.targets},
            files=_texts(side),
            within=str(side.within or ""),
            slow_down=side.slow_down,
            functions=side.functions,
            timer=self.timer,
            judge=name not in self.judged,
        )
        readings: dict[str, Reading] = {}
        begun: str | None = None
        try:
            for answer in _answers(side, job, limit_s):
                begun = answer.get("start", begun)
                if "environment" in answer:
                    self.environments.setdefault(name, answer["environment"])
                elif "key" in answer:
                    readings[answer["key"]] = _reading(answer["reading"])
        except ChildFailed as failed:
            status: Status = "TIMEOUT" if isinstance(failed, TimedOut) else "RUNTIME_ERROR"
            unread = [key for key in keys if key not in readings]
            for key in [begun] if begun in unread else unread:
                readings[key] = Reading(status, f"{side.label}: {failed}")
        return readings


def _texts(side: Side) -> tuple[str, ...]:
    return tuple(str(file) for file in side.files)


def _reading(values: Mapping[str, Any]) -> Reading:
    seconds, kernels = tuple(values["seconds"]), tuple(values["device_kernels"])
    return Reading(**{**values, "timestamp": now(), "seconds": seconds, "device_kernels": kernels})


def _answers(side: Side, job: Job, limit_s: float) -> Iterator[dict[str, Any]]:
    """The answers of one fresh process.  Raises `ChildFailed` if it ends early, or is silent for `limit_s`."""
    command = command_for(WORKER, tree=side.tree)
    # Not in the interpreter's mode: an interpreted kernel has no time.  Hash seeds differ between processes on purpose
    path = {"PYTHONPATH": side.import_path} if side.within else {}
    with Child(command, environment_without("TRITON_INTERPRET", "PYTHONHASHSEED") | path) as child:
        yield from child.stream(asdict(job), limit_s)

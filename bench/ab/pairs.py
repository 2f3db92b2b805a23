"""Fresh processes of an A/B: starts them and reads them, in pairs of seeded ABBA order, within a budget of time.

A process that dies or hangs loses only the kernel that it ran.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rooflab.bench.ab.evidence import CONFIRMS, fault_of
from rooflab.bench.ab.sides import Comparison, Side, SideName, Subset
from rooflab.bench.ab.verdict import Rules
from rooflab.bench.base.plain import plain
from rooflab.bench.base.system_time import time
from rooflab.bench.core import Child, ChildFailed, Record, Settings, Status
from rooflab.roofline.numbers import counted


@dataclass(frozen=True)
class AbSettings:
    """How long to measure, and how to judge."""

    rules: Rules = field(default_factory=Rules)
    pairs: int = 12
    budget_s: float | None = None
    """Seconds for the whole run, which ends early with the pairs that it has.  None sets no limit."""
    kernel_s: float = 0.3
    """Seconds for one kernel in one process."""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        Settings(device=self.device)  # refuses a device that is neither cpu nor cuda
        if self.pairs < 1:
            raise ValueError(f"pairs: expected at least 1, got {self.pairs}")
        if self.budget_s is not None and not self.budget_s > 0:
            raise ValueError(f"budget: expected a positive number of seconds, got {self.budget_s}")
        if not 0 < self.kernel_s < math.inf:
            raise ValueError(f"kernel-seconds: expected a positive number of seconds, got {self.kernel_s}")


Measure = Callable[[SideName, Collection[str]], dict[str, Record]]
"""Starts one process of a side, which measures these comparisons, and returns a record of each by key."""


@dataclass
class Batch:
    """The result of a run of pairs."""

    read: list[tuple[SideName, str, Record]] = field(default_factory=list)
    """Side, key and record of every reading, in time order."""
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
    confirms: bool = False,
    clock: Callable[[], float] = time.monotonic,
    done: Callable[[str], None] = lambda text: None,
) -> Batch:
    """Up to `pairs` pairs over `keys`.  A pair does not start if it would end after `deadline` (of `clock`), assuming
    that it takes as long as the longest pair so far.  It leaves time for `later` pairs.

    If `least` pairs and the later ones do not fit, the first pair is the last: the others could decide nothing.  A
    comparison whose reading cannot be compared leaves the run; the remaining comparisons continue.  A NOISY reading
    takes only its pair away.
    """
    batch, order = Batch(), orders(seed)
    broken: set[str] = set()
    noisy: dict[tuple[str, int], str] = {}
    longest = 0.0
    for number in range(pairs):
        alive = [key for key in keys if key not in broken]
        began = clock()
        if not alive:
            break
        lacking = (least + later - number) * longest - (deadline - began)
        if number == 1 and lacking > 0:
            lacks = f"the {least + later} pairs that a verdict takes need {lacking:.0f} s more"
            batch.stopped = f"the budget is too short: at {longest:.1f} s a pair, {lacks}"
            break
        if number and began + (1 + later) * longest > deadline:
            batch.stopped = f"the budget ended after {number} of {pairs} pairs"
            break
        for side in next(order):
            for key, record in measure(side, alive).items():
                metrics = {"pair": float(number), CONFIRMS: float(confirms)}
                name = f"{'second' if confirms else 'first'}-{number}{side}"
                record = replace(record, run_id=name, metrics={**record.metrics, **metrics})
                batch.read.append((side, key, record))
                if record.status == "NOISY":
                    noisy.setdefault((key, number), record.reason)
                elif fault_of(record) is not None:
                    broken.add(key)
            done(f"pair {number + 1} of {pairs}, side {side}")
        longest = max(longest, clock() - began)
    lost = [reason for (key, _), reason in noisy.items() if key not in broken]
    if lost and not batch.stopped:
        batch.stopped = f"{counted(len(lost), 'pair')} not counted, because a reading is NOISY: {lost[0]}"
    return batch


WORKER = "rooflab.bench.ab.ab_worker"
CHECK_S = 300.0
"""Time limit for the check of one kernel, in seconds."""
MEASURE_S = 60.0
"""Time limit for one kernel's reading on top of its budget: compilation, inputs and judging the outputs; in seconds."""


Mode = Literal["check", "measure", "list"]


@dataclass
class JobRunner:
    """Runs jobs of one comparison, each in a fresh process."""

    comparison: Comparison
    settings: AbSettings = field(default_factory=AbSettings)
    judged: set[SideName] = field(default_factory=set)
    """Sides whose outputs after timing have been judged: once for each, because an fp64 oracle can take 8 s."""
    environments: dict[SideName, dict[str, Any]] = field(default_factory=dict)
    """What the first process of each side said of the machine."""

    def measure(self, name: SideName, keys: Collection[str]) -> dict[str, Record]:
        """`Measure`: one process measures these kernels; if a kernel ends it, another process measures the rest."""
        readings = self._run_all(name, "measure", keys, MEASURE_S + 10 * self.settings.kernel_s)
        self.judged.add(name)
        return readings

    def check(self, name: SideName, keys: Collection[str]) -> dict[str, Record]:
        """One process checks these kernels; if a kernel ends the process, another process checks the rest."""
        return self._run_all(name, "check", keys, CHECK_S)

    def list(self, name: SideName, subset: Subset) -> dict[str, Any]:
        """Ops, kernels and cases of one side's tree, and which of the wanted cases it has.

        Raises `ChildFailed` if the tree cannot be imported.
        """
        side = self.comparison.side(name)
        asked = {"ops": subset.ops, "suite": subset.suite_name, "cases": subset.cases}
        answers = list(ask_process(side, self._job(side, "list", ()) | asked, CHECK_S))
        listed: dict[str, Any] = next(answer["list"] for answer in answers if "list" in answer)
        return listed

    def _job(self, side: Side, mode: Mode, keys: Collection[str]) -> dict[str, Any]:
        """The work of one fresh process as JSON values: the side, with the targets of `keys`, and the settings."""
        job: dict[str, Any] = plain(replace(side, targets={key: side.targets[key] for key in keys}))
        how = {name: getattr(self.settings, name) for name in ("device", "seed", "kernel_s")}
        return job | how | {"mode": mode}

    def _run_all(self, name: SideName, mode: Mode, keys: Collection[str], limit_s: float) -> dict[str, Record]:
        readings: dict[str, Record] = {}
        left = list(keys)
        while left and (answered := self._run(name, mode, left, limit_s)):
            readings |= answered
            left = [key for key in left if key not in readings]
        for key in left:
            readings[key] = self._failed(name, key, "RUNTIME_ERROR", "its process gave no answer about it")
        return readings

    def _run(self, name: SideName, mode: Mode, keys: Collection[str], limit_s: float) -> dict[str, Record]:
        """The readings that one process finished; the kernel that ended the process gets a failure as its reading."""
        side = self.comparison.side(name)
        job = self._job(side, mode, keys) | {"judge": name not in self.judged}
        readings: dict[str, Record] = {}
        begun: str | None = None
        try:
            for answer in ask_process(side, job, limit_s):
                begun = answer.get("start", begun)
                if "environment" in answer:
                    self.environments.setdefault(name, answer["environment"])
                elif "key" in answer:
                    readings[answer["key"]] = Record.from_json(answer["record"])
        except ChildFailed as failed:
            status: Status = "TIMEOUT" if failed.limit_s is not None else "RUNTIME_ERROR"
            unread = [key for key in keys if key not in readings]
            for key in [begun] if begun in unread else unread:
                readings[key] = self._failed(name, key, status, str(failed))
        return readings

    def _failed(self, name: SideName, key: str, status: Status, reason: str) -> Record:
        blank = self.comparison.side(name).targets[key].record(self.settings.device, self.settings.seed)
        return replace(blank, status=status, reason=reason)


def ask_process(side: Side, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
    """The answers of one fresh process.  Raises `ChildFailed` if it ends early, or is silent for `limit_s`."""
    # Not in the interpreter's mode: an interpreted kernel has no time.  Hash seeds differ between processes on purpose.
    environment: dict[str, str | None] = {"TRITON_INTERPRET": None, "PYTHONHASHSEED": None}
    environment |= {"PYTHONPATH": side.import_path} if side.within else {}
    with Child(WORKER, environment=environment, tree=side.tree) as child:
        yield from child.stream(job, limit_s)

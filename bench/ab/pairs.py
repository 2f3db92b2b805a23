"""Runs the fresh processes of an A/B comparison: in pairs, in a seeded ABBA order, within a time budget.

If a process dies or hangs, only the measurement of its current kernel is lost.
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
    """Holds the settings of an A/B comparison: how long to measure, and how to judge."""

    rules: Rules = field(default_factory=Rules)
    pairs: int = 12
    budget_s: float | None = None
    """Seconds for the whole run.  At the limit the run ends with fewer pairs.  None sets no limit."""
    kernel_s: float = 0.3
    """Seconds for the reading of one kernel in one process."""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        # Refuses a device that is neither cpu nor cuda, and a budget that is no positive number of seconds.
        Settings(device=self.device, budget_s=math.inf if self.budget_s is None else self.budget_s)
        if self.pairs < 1:
            raise ValueError(f"pairs: expected at least 1, got {self.pairs}")
        if not 0 < self.kernel_s < math.inf:
            raise ValueError(f"kernel-seconds: expected a positive number of seconds, got {self.kernel_s}")


MeasureFn = Callable[[SideName, Collection[str]], dict[str, Record]]
"""A function that measures the comparisons with these keys in one process of a side, and returns the records by key."""


SideRecords = list[tuple[SideName, str, Record]]
"""A list of readings, each with its side, the key of its comparison, and its record."""


def orders(seed: int) -> Iterator[tuple[SideName, SideName]]:
    """Yields the order of the sides in each pair.  Two pairs run as ABBA or BAAB (drawn by `seed`) to cancel drift."""
    generator = random.Random(seed)
    while True:
        first_order: tuple[SideName, SideName] = ("A", "B") if generator.random() < 0.5 else ("B", "A")
        yield first_order
        yield first_order[1], first_order[0]


def run_pairs(
    measure: MeasureFn,
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
) -> tuple[SideRecords, str]:
    """Measures kernels in pairs of processes, one for side A and one for B.  `keys` names the kernels' comparisons.

    Runs at most `pairs` pairs before the time `deadline` of `clock`.  The first pair always runs.  The last pair leaves
    enough time for `later` pairs, which a second call will measure.

    A verdict needs `least` pairs from this call.  If `least + later` pairs would take too long, only one pair runs.

    A fault ends the measurement of its kernel.  A NOISY record spoils only its own pair.

    Returns the readings in time order, and why there are fewer pairs than `pairs`: "" if there are all."""
    read, stopped, side_orders = SideRecords(), "", orders(seed)
    broken_keys: set[str] = set()
    noisy_reasons: dict[tuple[str, int], str] = {}
    max_pair_s = 0.0
    for pair_number in range(pairs):
        valid_keys = [key for key in keys if key not in broken_keys]
        start_s = clock()
        if not valid_keys:
            break
        overrun_s = (least + later - pair_number) * max_pair_s - (deadline - start_s)
        if pair_number == 1 and overrun_s > 0:
            pairs_text = f"the {least + later} pairs that a verdict takes need {overrun_s:.0f} s more"
            stopped = f"the budget is too short: at {max_pair_s:.1f} s a pair, {pairs_text}"
            break
        if pair_number and start_s + (1 + later) * max_pair_s > deadline:
            stopped = f"the budget ended after {pair_number} of {pairs} pairs"
            break
        for side in next(side_orders):
            for key, record in measure(side, valid_keys).items():
                pair_metrics = {"pair": float(pair_number), CONFIRMS: float(confirms)}
                name = f"{'second' if confirms else 'first'}-{pair_number}{side}"
                record = replace(record, run_id=name, metrics={**record.metrics, **pair_metrics})
                read.append((side, key, record))
                if record.status == "NOISY":
                    noisy_reasons.setdefault((key, pair_number), record.reason)
                elif fault_of(record) is not None:
                    broken_keys.add(key)
            done(f"pair {pair_number + 1} of {pairs}, side {side}")
        max_pair_s = max(max_pair_s, clock() - start_s)
    reasons = [noise_text for (key, _), noise_text in noisy_reasons.items() if key not in broken_keys]
    if reasons and not stopped:
        stopped = f"{counted(len(reasons), 'pair')} not counted, because a reading is NOISY: {reasons[0]}"
    return read, stopped


WORKER_MODULE = "rooflab.bench.ab.ab_worker"
CHECK_LIMIT_S = 300.0
"""The time limit for the check of one kernel, in seconds."""
MEASURE_LIMIT_S = 60.0
"""Seconds added to the budget of one kernel's reading, to compile, to make inputs, and to judge the outputs."""


JobMode = Literal["check", "measure", "list"]


@dataclass
class JobRunner:
    """Runs the jobs of one comparison, each job in a fresh process."""

    comparison: Comparison
    settings: AbSettings = field(default_factory=AbSettings)
    judged: set[SideName] = field(default_factory=set)
    """The sides whose timed outputs were judged.  Each side is judged once, because an fp64 oracle can take 8 s."""
    environments: dict[SideName, dict[str, Any]] = field(default_factory=dict)
    """The environment that the first process of each side reported."""

    def measure(self, name: SideName, keys: Collection[str]) -> dict[str, Record]:
        """Measures the kernels of `keys` in a process.  If a kernel kills it, a new process measures the rest."""
        readings = self._run_all(name, "measure", keys, MEASURE_LIMIT_S + 10 * self.settings.kernel_s)
        self.judged.add(name)
        return readings

    def check(self, name: SideName, keys: Collection[str]) -> dict[str, Record]:
        """Checks the kernels of `keys` in a process.  If a kernel kills it, a new process checks the rest."""
        return self._run_all(name, "check", keys, CHECK_LIMIT_S)

    def list(self, name: SideName, subset: Subset, option: str) -> dict[str, Any]:
        """Lists the ops, kernels and cases in one side's source tree, and the requested cases that its ops accept.

        Raises `ValueError`, which names `option`, if the tree cannot be imported."""
        side = self.comparison.side(name)
        list_request = {"ops": subset.ops, "suite": subset.suite_name, "cases": subset.cases}
        try:
            answers = list(ask_process(side, self._job(side, "list", ()) | list_request, CHECK_LIMIT_S))
        except ChildFailed as failed:
            raise ValueError(f"{option}: expected a tree that can be imported, got {side.label}: {failed}") from failed
        side_listing: dict[str, Any] = next(answer["list"] for answer in answers if "list" in answer)
        return side_listing

    def _job(self, side: Side, mode: JobMode, keys: Collection[str]) -> dict[str, Any]:
        """Returns the job for a process that measures one side (baseline or candidate), as JSON values.  The job holds
        the mode, the settings, and the kernels that `keys` names."""
        job_fields: dict[str, Any] = plain(replace(side, targets={key: side.targets[key] for key in keys}))
        job_options = {name: getattr(self.settings, name) for name in ("device", "seed", "kernel_s")}
        return job_fields | job_options | {"mode": mode}

    def _run_all(self, name: SideName, mode: JobMode, keys: Collection[str], limit_s: float) -> dict[str, Record]:
        readings: dict[str, Record] = {}
        remaining_keys = list(keys)
        while remaining_keys and (new_readings := self._run(name, mode, remaining_keys, limit_s)):
            readings |= new_readings
            remaining_keys = [key for key in remaining_keys if key not in readings]
        for key in remaining_keys:
            readings[key] = self._failed(name, key, "RUNTIME_ERROR", "its process gave no answer about it")
        return readings

    def _run(self, name: SideName, mode: JobMode, keys: Collection[str], limit_s: float) -> dict[str, Record]:
        """Runs a process for one side, and returns its records by key.  If a kernel ends it, adds a failure record."""
        side = self.comparison.side(name)
        job_fields = self._job(side, mode, keys) | {"judge": name not in self.judged}
        readings: dict[str, Record] = {}
        started_key: str | None = None
        try:
            for answer in ask_process(side, job_fields, limit_s):
                started_key = answer.get("start", started_key)
                if "environment" in answer:
                    self.environments.setdefault(name, answer["environment"])
                elif "key" in answer:
                    readings[answer["key"]] = Record.from_json(answer["record"])
        except ChildFailed as failed:
            failure_status: Status = "TIMEOUT" if failed.limit_s is not None else "RUNTIME_ERROR"
            unread_keys = [key for key in keys if key not in readings]
            for key in [started_key] if started_key in unread_keys else unread_keys:
                readings[key] = self._failed(name, key, failure_status, str(failed))
        return readings

    def _failed(self, name: SideName, key: str, status: Status, reason: str) -> Record:
        blank_record = self.comparison.side(name).targets[key].record(self.settings.device, self.settings.seed)
        return replace(blank_record, status=status, reason=reason)


def ask_process(side: Side, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields the answers of a process.  Raises `ChildFailed` if the process ends early or is silent for `limit_s` s."""
    # Not in the interpreter's mode: an interpreted kernel has no time.  Hash seeds differ between processes on purpose.
    environment_changes: dict[str, str | None] = {"TRITON_INTERPRET": None, "PYTHONHASHSEED": None}
    environment_changes |= {"PYTHONPATH": side.import_path} if side.within else {}
    with Child(WORKER_MODULE, environment=environment_changes, tree=side.tree) as worker_process:
        yield from worker_process.stream(job, limit_s)

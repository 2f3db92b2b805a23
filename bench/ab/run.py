"""One A/B from start to end: check both sides, measure pairs of fresh processes, confirm the differences, judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooflab.bench.ab.pairs import Batch, JobRunner, run_pairs
from rooflab.bench.ab.sides import SIDES, Comparison, Reading, SideName
from rooflab.bench.ab.verdict import (
    BOUNDED_PAIRS,
    SUITE_PAIRS,
    Evidence,
    Outcome,
    Rules,
    judge,
    load_floors,
    wants_confirmation,
)
from rooflab.bench.core.record import NOT_RUN, Verdict, paired_method_of
from rooflab.bench.core.system_time import time

SAME_HARDWARE = ("machine_key", "cpu", "cores", "threads")


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
    timer: str | None = None

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(f"pairs: expected at least 1, got {self.pairs}")
        if self.budget_s is not None and not self.budget_s > 0:
            raise ValueError(f"budget: expected a positive number of seconds, got {self.budget_s}")
        if not 0 < self.kernel_s < math.inf:
            raise ValueError(f"kernel-seconds: expected a positive number of seconds, got {self.kernel_s}")


@dataclass(frozen=True)
class AbResult:
    """The result of a run."""

    comparison: Comparison
    settings: AbSettings
    outcomes: tuple[Outcome, ...]
    environments: Mapping[str, Mapping[str, Any]]
    """The environment of each side."""
    first: Batch
    second: Batch
    seconds: float
    stopped: str = ""
    """Why the run measured less than the caller asked for."""
    checks: Mapping[tuple[SideName, str], Reading] = field(default_factory=dict)
    """Checks that did not end with OK, by side and comparison."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Comparisons that neither side can run here, with the reason: they have no outcome."""


def run(
    comparison: Comparison,
    settings: AbSettings,
    done: Callable[[str], None] = lambda text: None,
    floors: Mapping[str, float] | None = None,
    *,
    checked: bool = False,
    by_activity: bool = True,
) -> AbResult:
    """Runs and judges `comparison`.  A fault of a kernel raises no exception: it becomes a verdict.

    `floors` are noise floors by comparison; without them, the run uses this machine's remembered floors.  `checked`
    says that an earlier run has checked this very code and judged its timed outputs, so that this run only measures.
    Without `by_activity`, only the times are judged, even if both sides ran the same device code.
    """
    runner = JobRunner(comparison, settings.device, settings.seed, settings.kernel_s, settings.timer)
    runner.judged |= set(SIDES) if checked else set()
    began = time.monotonic()
    missing = {key: reason for key in comparison.keys if (reason := comparison.missing(key)) is not None}
    broken: dict[str, tuple[Verdict, str]] = {key: ("MISSING", reason) for key, reason in missing.items()}
    if settings.budget_s is not None:
        needed = _needed_s(runner.start_s(), len(comparison.keys), settings, checked)
        if needed > settings.budget_s:
            short = f"the budget of {settings.budget_s:g} s is too short for a verdict on this machine"
            done(f"{short}, which takes at least {needed:.0f} s")
    checks = {} if checked else _failed_checks(runner, [key for key in comparison.keys if key not in broken], done)
    left_out = {} if comparison.a.functions else _not_timed(comparison, checks)
    keys = [key for key in comparison.keys if key not in left_out]
    # What is wrong on one side is said before why the other could not be timed.
    for (name, key), reading in sorted(checks.items(), key=lambda check: check[1].status in NOT_RUN):
        broken.setdefault(key, _verdict_of(comparison, name, reading))
    broken |= _other_machine(runner.environments, [key for key in keys if key not in broken])

    def measured(called: Sequence[str], seed: int, least: int = 0, later: int = 0) -> Batch:
        until = math.inf if settings.budget_s is None else began + settings.budget_s
        most = settings.pairs
        least, later = min(least, most), min(later, most)  # as `_needed_s` counts
        batch = run_pairs(runner.measure, called, most, seed=seed, deadline=until, least=least, later=later, done=done)
        broken.update({key: _verdict_of(comparison, side, read) for key, (side, read) in batch.broken.items()})
        return batch

    first = measured([key for key in keys if key not in broken], settings.seed, _least(len(keys)), BOUNDED_PAIRS)
    evidence = [_evidence(key, broken, first, Batch(), by_activity) for key in keys]
    called = [item.key for item in evidence if wants_confirmation(item, settings.rules)]
    second = measured(called, settings.seed + 1)
    known = load_floors(str(runner.environments.get("B", {}).get("machine_key", ""))) if floors is None else floors
    evidence = [_evidence(key, broken, first, second, by_activity, _floor(comparison, key, known)) for key in keys]
    return AbResult(
        comparison=comparison,
        settings=settings,
        outcomes=tuple(judge(evidence, settings.rules)),
        environments={str(name): found for name, found in runner.environments.items()},
        first=first,
        second=second,
        seconds=time.monotonic() - began,
        stopped=first.stopped or (f"confirmation: {second.stopped}" if second.stopped else ""),
        checks=checks,
        left_out=left_out,
    )


def _least(keys: int) -> int:
    """Pairs of the first batch that a verdict takes."""
    return SUITE_PAIRS if keys > 1 else BOUNDED_PAIRS


def _needed_s(start_s: float, keys: int, settings: AbSettings, checked: bool) -> float:
    """The least seconds of a run that can decide: two processes a pair, and two that check."""
    pairs = min(_least(keys), settings.pairs) + min(BOUNDED_PAIRS, settings.pairs)
    return 2 * pairs * (start_s + keys * settings.kernel_s) + (0.0 if checked else 2 * start_s)


def _failed_checks(
    runner: JobRunner, keys: Sequence[str], done: Callable[[str], None]
) -> dict[tuple[SideName, str], Reading]:
    """The checks that did not end with OK, by side and comparison; a check without an answer is one of them."""
    failed: dict[tuple[SideName, str], Reading] = {}
    for name in SIDES:
        # A kernel that is wrong on side A is not checked on B; one that cannot run on A is, as it may run on neither.
        left = [key for key in keys if ("A", key) not in failed or failed["A", key].status in NOT_RUN]
        readings = runner.check(name, left) if left else {}
        for key in left:
            reading = readings.get(key, Reading("RUNTIME_ERROR", "its check gave no answer"))
            if reading.status != "OK":
                failed[name, key] = reading
        done(f"check, side {name}")
    return failed


def _not_timed(comparison: Comparison, checks: Mapping[tuple[SideName, str], Reading]) -> dict[str, str]:
    """Comparisons whose kernel can run on neither side, or of two kernels of which one cannot, with the reason."""
    cannot = {where: reading.reason for where, reading in checks.items() if reading.status in NOT_RUN}
    found = {}
    for (name, key), reason in cannot.items():
        targets = comparison.a.targets[key], comparison.b.targets[key]
        if {("A", key), ("B", key)} <= cannot.keys() or targets[0] != targets[1]:
            found[key] = (
                f"{comparison.side(name).targets[key].kernel}: {reason}" if targets[0] != targets[1] else reason
            )
    return found


def _verdict_of(comparison: Comparison, name: SideName, reading: Reading) -> tuple[Verdict, str]:
    """The verdict on a comparison that has a reading other than OK."""
    label = comparison.side(name).label
    reason = reading.reason.removeprefix(f"{label}: ")
    if reading.status in ("INCORRECT", "INVALID", "NOISY"):
        return ("INCORRECT" if reading.status == "INCORRECT" else "INVALID"), f"{label}: {reason}"
    return "FAILED", f"{label}: {reading.status}: {reason}"


def _other_machine(
    environments: Mapping[SideName, Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, tuple[Verdict, str]]:
    """INVALID for every key where the sides' processes saw different machines."""
    reason = difference(environments["A"], environments["B"]) if len(environments) == 2 else ""
    return dict.fromkeys(keys, ("INVALID", reason)) if reason else {}


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """How two environments differ in what decides a time and is not part of a change; empty if they do not differ."""
    gpus = a.get("gpu") or {}, b.get("gpu") or {}
    for name in ("name", "driver", "max_sm_clock_mhz", "power_limit_w", "mig"):
        if gpus[0].get(name) != gpus[1].get(name):
            return f"the sides ran on different GPUs or drivers: {name} {gpus[0].get(name)} and {gpus[1].get(name)}"
    for name in SAME_HARDWARE:
        if a.get(name) != b.get(name):
            return f"the sides ran on different machines or settings: {name} {a.get(name)} and {b.get(name)}"
    return ""


def _evidence(
    key: str,
    broken: Mapping[str, tuple[Verdict, str]],
    first: Batch,
    second: Batch,
    by_activity: bool,
    noise_floor: float | None = None,
) -> Evidence:
    calling = [reading for _, _, name, reading in first.readings if name == key]
    readings = [*calling, *(reading for _, _, name, reading in second.readings if name == key)]
    methods = [paired_method_of(reading.method, reading.l2_state) for reading in readings if reading.status == "OK"]
    return Evidence(
        key=key,
        first=tuple(first.pairs.get(key, ())),
        second=tuple(second.pairs.get(key, ())),
        broken=broken.get(key) or several_methods(methods),
        identical=by_activity and one_activity(reading.activity_hash for reading in calling),
        noise_floor=noise_floor,
        unconfirmed=f"seen once and not confirmed: {second.stopped}" if second.stopped else "",
    )


def several_methods(methods: Iterable[str]) -> tuple[Verdict, str] | None:
    """INVALID if several methods timed one comparison: warm and cold L2 are two methods, whatever the kernel."""
    names = list(dict.fromkeys(methods))
    return ("INVALID", f"it was timed by different methods: {' and '.join(names)}") if len(names) > 1 else None


def one_activity(hashes: Iterable[str | None]) -> bool:
    """Whether every process showed the same device activity."""
    seen = set(hashes)
    return len(seen) == 1 and None not in seen


def _floor(comparison: Comparison, key: str, known: Mapping[str, float]) -> float | None:
    """The larger noise floor of the two compared kernels: an A/A stores its floor by kernel, also for two kernels."""
    names = {side.targets[key].id for side in (comparison.a, comparison.b) if key in side.targets}
    return max((known[name] for name in names if name in known), default=None)

"""One A/B from beginning to end: check both sides, pair fresh processes, confirm what was called, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooflab.bench.ab.floors import load as load_floors
from rooflab.bench.ab.pairs import Batch, Reading, SideName, run_pairs
from rooflab.bench.ab.processes import Runner
from rooflab.bench.ab.sides import Comparison
from rooflab.bench.ab.verdict import Evidence, Outcome, Rules, judge, wants_confirmation
from rooflab.bench.records.methods import paired_method_of
from rooflab.bench.records.record import Verdict

CONFIRMATION_SHARE = 0.4
"""Share of a budget kept for the confirmation and not given to the first batch."""
SAME_HARDWARE = ("machine_key", "cpu", "cores", "threads")
NOT_RUN = ("UNSUPPORTED", "UNAVAILABLE")
"""Statuses of a kernel that cannot run here; where it is so on both sides there is nothing to compare."""


@dataclass(frozen=True)
class Settings:
    """How much is measured, and how it is judged."""

    rules: Rules = field(default_factory=Rules)
    pairs: int = 12
    budget_s: float | None = None
    """Seconds for the whole run; it ends early with what it has.  None sets no limit."""
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
        if not self.kernel_s > 0:
            raise ValueError(f"kernel-seconds: expected a positive number of seconds, got {self.kernel_s}")


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    comparison: Comparison
    settings: Settings
    outcomes: tuple[Outcome, ...]
    environments: Mapping[str, Mapping[str, Any]]
    """By side."""
    first: Batch
    second: Batch
    seconds: float
    stopped: str = ""
    """Why less was measured than asked for."""
    checks: Mapping[tuple[SideName, str], Reading] = field(default_factory=dict)
    """Checks that did not end well, by side and comparison."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Comparisons that neither side can run here, and why: they have no outcome."""


def run(
    comparison: Comparison,
    settings: Settings,
    done: Callable[[str], None] = lambda text: None,
    floors: Mapping[str, float] | None = None,
    *,
    checked: bool = False,
    by_activity: bool = True,
) -> Result:
    """Runs and judges `comparison`.  Raises nothing that a kernel did: that becomes a verdict.

    `floors` are noise floors by comparison; without them those remembered of this machine.  `checked` says that an
    earlier run has checked this very code and judged its timed outputs, so that this one only measures.  Without
    `by_activity` the times alone are judged, also where both sides ran the same device code.
    """
    names: tuple[SideName, ...] = ("A", "B")
    runner = Runner(comparison, settings.device, settings.seed, settings.kernel_s, settings.timer)
    runner.judged |= set(names) if checked else set()
    began = time.monotonic()
    ends = began + settings.budget_s if settings.budget_s is not None else float("inf")
    broken: dict[str, tuple[Verdict, str]] = {}
    for key in comparison.keys:
        missing = comparison.missing(key)
        if missing:
            broken[key] = ("MISSING", missing)
    checks = {} if checked else _failed_checks(runner, [key for key in comparison.keys if key not in broken], done)
    left_out = _on_neither(comparison, checks)
    keys = [key for key in comparison.keys if key not in left_out]
    for (name, key), reading in checks.items():
        broken.setdefault(key, _verdict_of(comparison, name, reading))
    broken |= _other_machine(runner.environments, [key for key in keys if key not in broken])
    whole = [key for key in keys if key not in broken]
    until = ends - CONFIRMATION_SHARE * max(0.0, ends - time.monotonic()) if ends < float("inf") else ends
    first = run_pairs(runner.measure, whole, settings.pairs, seed=settings.seed, deadline=until, done=done)
    broken |= {key: _verdict_of(comparison, side, reading) for key, (side, reading) in first.broken.items()}
    evidence = [_evidence(key, broken, first, Batch(), by_activity) for key in keys]
    called = [item.key for item in evidence if wants_confirmation(item, settings.rules)]
    second = run_pairs(runner.measure, called, settings.pairs, seed=settings.seed + 1, deadline=ends, done=done)
    broken |= {key: _verdict_of(comparison, side, reading) for key, (side, reading) in second.broken.items()}
    known = load_floors(str(runner.environments.get("B", {}).get("machine_key", ""))) if floors is None else floors
    evidence = [_evidence(key, broken, first, second, by_activity, _floor(comparison, key, known)) for key in keys]
    return Result(
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


def _failed_checks(
    runner: Runner, keys: Sequence[str], done: Callable[[str], None]
) -> dict[tuple[SideName, str], Reading]:
    """The checks that did not end well, by side and comparison; one without an answer is none that did."""
    failed: dict[tuple[SideName, str], Reading] = {}
    names: tuple[SideName, ...] = ("A", "B")
    for name in names:
        # What is wrong on side A need not be checked again; what cannot run there may be so on both.
        left = [key for key in keys if ("A", key) not in failed or failed["A", key].status in NOT_RUN]
        found = runner.check(name, left) if left else {}
        for key in left:
            reading = found.get(key, Reading("RUNTIME_ERROR", "its check gave no answer"))
            if reading.status != "OK":
                failed[name, key] = reading
        done(f"check, side {name}")
    return failed


def _on_neither(comparison: Comparison, checks: Mapping[tuple[SideName, str], Reading]) -> dict[str, str]:
    """Why a comparison can be run on neither side, for each of which it is so; functions were meant to be run."""
    return {
        key: reading.reason
        for (name, key), reading in checks.items()
        if name == "B" and reading.status in NOT_RUN and not comparison.a.functions
        if ("A", key) in checks and checks["A", key].status in NOT_RUN
    }


def _verdict_of(comparison: Comparison, name: SideName, reading: Reading) -> tuple[Verdict, str]:
    """What a reading that is not OK makes of its comparison."""
    label = comparison.side(name).label
    reason = reading.reason if reading.reason.startswith(label) else f"{label}: {reading.reason}"
    if reading.status in ("INCORRECT", "INVALID"):
        return ("INCORRECT" if reading.status == "INCORRECT" else "INVALID"), reason
    return "FAILED", f"{label}: {reading.status}: {reason.removeprefix(f'{label}: ')}"


def _other_machine(
    environments: Mapping[SideName, Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, tuple[Verdict, str]]:
    """INVALID for every key where the sides' processes saw different machines."""
    if len(environments) < 2:
        return {}
    reason = difference(environments["A"], environments["B"])
    return dict.fromkeys(keys, ("INVALID", reason)) if reason else {}


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """How two environments differ in what decides a time and is no part of a change, or nothing."""
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
    by_activity: bool = True,
    noise_floor: float | None = None,
) -> Evidence:
    return Evidence(
        key=key,
        first=tuple(first.pairs.get(key, ())),
        second=tuple(second.pairs.get(key, ())),
        broken=broken.get(key) or _read_otherwise(key, first, second),
        identical=by_activity and _identical(key, first),
        noise_floor=noise_floor,
        unconfirmed=f"seen once and not confirmed: {second.stopped}" if second.stopped else "",
    )


def _read_otherwise(key: str, *batches: Batch) -> tuple[Verdict, str] | None:
    """INVALID where the processes timed it by several methods: warm and cold L2 are two, whatever the kernel."""
    readings = [found for batch in batches for _, _, name, found in batch.readings if name == key]
    return several_methods(paired_method_of(found.method, found.l2_state) for found in readings if found.status == "OK")


def several_methods(methods: Iterable[str]) -> tuple[Verdict, str] | None:
    """INVALID where the methods of a comparison are not all one."""
    found = list(dict.fromkeys(methods))
    return ("INVALID", f"it was timed by different methods: {' and '.join(found)}") if len(found) > 1 else None


def _floor(comparison: Comparison, key: str, known: Mapping[str, float]) -> float | None:
    """The larger floor of the two kernels compared: an A/A is remembered by its kernel, also where two are compared."""
    names = {side.targets[key].id for side in (comparison.a, comparison.b) if key in side.targets}
    return max((known[name] for name in names if name in known), default=None)


def _identical(key: str, batch: Batch) -> bool:
    """Whether all processes of both sides showed one device activity."""
    hashes = {reading.activity_hash for _, _, name, reading in batch.readings if name == key}
    return len(hashes) == 1 and None not in hashes
